"""Beam searches for the oracle: which models, prompts and options."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from prompts import PROMPTS

SMOLLM2_PROMPTS = [PROMPTS[index] for index in (0, 3, 4, 7, 13, 17, 19, 21)]
END, FULL_STOP = 2, 30
"""SmolLM2's ids of its end token and of "."; the latter makes hypotheses of many lengths."""

SMOLLM2_CASES = [
    (SMOLLM2_PROMPTS, {"num_beams": 4, "max_new_tokens": 32, "eos": [END]}),
    (
        SMOLLM2_PROMPTS,
        {"num_beams": 4, "max_new_tokens": 32, "eos": [FULL_STOP], "length_penalty": 2.0, "num_return_sequences": 4},
    ),
    (
        SMOLLM2_PROMPTS,
        {"num_beams": 4, "max_new_tokens": 32, "eos": [END], "length_penalty": 0.0, "early_stopping": "never"},
    ),
    (SMOLLM2_PROMPTS[:3], {"num_beams": 2, "max_new_tokens": 32, "eos": [END, FULL_STOP], "early_stopping": True}),
    (
        SMOLLM2_PROMPTS[5:],
        {"num_beams": 6, "max_new_tokens": 32, "eos": [END], "early_stopping": True, "num_return_sequences": 3},
    ),
]
"""Prompts and options."""

PENALTIES, STOPPINGS = (-1.0, 0.0, 1.0, 2.0), (False, True, "never")


def tiny_cases(name: str, runs: list[dict[str, Any]], max_new_tokens: int = 20) -> list[tuple[list[int], dict]]:
    """(prompt, options) for a tiny model with its greedy runs.

    Every penalty with every early stopping at 4 beams; for one model at 2 and 6 too, and without end tokens.  The two
    end tokens are those that the prompt's greedy run meets after 4 and after 9 tokens.
    """
    settings = [(4, True, run) for run in (runs[0], runs[2])]
    if name == "tiny-llama":
        settings += [(2, True, runs[1]), (6, True, runs[1]), (4, False, runs[1])]
    cases = []
    for num_beams, ending, run in settings:
        for index, (penalty, stopping) in enumerate(product(PENALTIES, STOPPINGS)):
            options = {
                "num_beams": num_beams,
                "max_new_tokens": max_new_tokens,
                "eos": [run["tokens"][4], run["tokens"][9]] if ending else [],
                "length_penalty": penalty,
                "early_stopping": stopping,
                "num_return_sequences": 1 + index % num_beams,
            }
            cases.append((run["ids"], options))
    return cases


def beam_search(model: Any, ids: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """One prompt by itself: what `generate` returns, each sequence cut after its first end token."""
    eos = options["eos"]
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        do_sample=False,
        num_beams=options["num_beams"],
        num_return_sequences=options.get("num_return_sequences", 1),
        max_new_tokens=options["max_new_tokens"],
        length_penalty=options.get("length_penalty", 1.0),
        early_stopping=options.get("early_stopping", False),
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        return_dict_in_generate=True,
        output_scores=True,  # without it there are no sequences_scores
    )
    sequences = []
    for sequence in output.sequences[:, len(ids) :].tolist():
        ends = [place for place, token in enumerate(sequence) if token in eos]
        sequences.append(sequence[: ends[0] + 1] if ends else sequence)
    scores = [round(score, 6) for score in output.sequences_scores.tolist()]
    return {"ids": ids, "options": options, "sequences": sequences, "scores": scores}
