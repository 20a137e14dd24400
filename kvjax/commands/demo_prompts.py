"""The conversations of `kvjax demo`: one system prompt for all, sixteen questions of different lengths."""

from __future__ import annotations

from dataclasses import dataclass

SYSTEM = (
    "You are a careful assistant at the help desk of a public library. People of all ages write to you. Answer in "
    "plain English, in short sentences, and keep to what was asked. If a question asks for a list, number the items. "
    "If you are not sure of a fact, say so instead of guessing. Never invent the title of a book or the name of a "
    "person."
)


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation.

    Attributes:
      text: what the user says.
      max_new_tokens: of the answer.
      cancel_after: tokens after which its user goes away; None if they stay.
    """

    text: str
    max_new_tokens: int
    cancel_after: int | None = None


QUESTIONS = (
    Question("What is the capital of France?", 32),
    Question("Explain to a ten-year-old why the sky is blue.", 72),
    Question("Write a polite email asking my landlord to repair a leaking kitchen tap.", 96),
    Question("Name the three states of water and one example of each.", 64),
    Question(
        "Summarise this in one sentence: The river rose two metres overnight. By morning the lower road was under "
        "water, the school was closed, and the fire brigade had brought eleven people to the town hall, where "
        "volunteers made tea and found dry clothes for them. Nobody was hurt.",
        56,
    ),
    Question("Give me a recipe for pancakes with five ingredients.", 96, cancel_after=24),
    Question("How do I reverse a list in Python?", 64),
    Question("Translate into French: Good morning, where is the station?", 40),
    Question("List four things to check before a long bicycle ride.", 80),
    Question(
        "I have 24 apples. I give a third of them to my neighbour and then eat two. How many are left? Show each step.",
        72,
    ),
    Question("What does photosynthesis do, and what does a plant need for it?", 72, cancel_after=12),
    Question("Write a short poem about an old lighthouse.", 80),
    Question("What is the difference between weather and climate?", 64),
    Question(
        "My grandmother is 82 and has never used a computer. She would like to write emails and look at photographs of "
        "her great-grandchildren. What should I teach her first, and in which order?",
        96,
    ),
    Question("Suggest a name for a small bakery by the sea, and say why it fits.", 48),
    Question("Why do leaves change colour in autumn?", 72, cancel_after=40),
)
