"""Prints what became of each prompt, as soon as it may be."""

from __future__ import annotations

from typing import Any, Literal

from kvjax.commands.output import complain, on_terminal, say, say_json
from kvjax.commands.prompts import Prompt
from kvjax.commands.text import one_line
from kvjax.engine import Result

Form = Literal["json", "text", "stream"]
"""One JSON line a prompt, in the order of the input; answers for reading, as they end; the only one piece by piece."""


class Answers:
    """The output of a run over `number` prompts.  Whatever is printed is flushed: an interrupt loses nothing finished.

    Attributes:
      failed: prompts that ended with an error, each of which stderr has a line about.
    """

    def __init__(self, command: str, number: int, form: Form):
        self._command, self._number, self._form = command, number, form
        self._settled: set[int] = set()
        self._held: dict[int, tuple[Prompt, Result | None]] = {}  # settled, before their turn
        self._next = 0  # whose turn it is to be printed
        self._line_open = False
        self._bar: Any = None
        self.failed = 0

    @property
    def unanswered(self) -> int:
        """Prompts that have not ended."""
        return self._number - len(self._settled)

    def show_progress(self) -> None:
        """Starts a progress bar on stderr, if that is a terminal and nothing else moves there."""
        if on_terminal() and self._form != "stream":
            from tqdm import tqdm

            self._bar = tqdm(total=self._number, initial=len(self._settled), unit="prompt")

    def piece(self, text: str) -> None:
        """More text of the only answer, for the form that shows it as it comes."""
        if text and self._form == "stream":
            say(text, end="")
            self._line_open = True

    def settle(self, index: int, prompt: Prompt, result: Result | None) -> None:
        """A prompt has ended: with a result, or without because of `prompt.problem`.  Only the first call counts."""
        if index in self._settled:
            return
        self._settled.add(index)
        self._held[index] = (prompt, result)
        if self._form != "json":
            self._print(index)
        while self._next in self._held:
            self._print(self._next)
            self._next += 1
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Prints all that is still held back, for the run is over, and ends the bar."""
        if self._bar is not None:
            self._bar.close()
        for index in sorted(self._held):
            self._print(index)
        self._end_line()

    def _print(self, index: int) -> None:
        if self._bar is None:
            self._print_pair(*self._held.pop(index))
        else:
            with self._bar.external_write_mode():
                self._print_pair(*self._held.pop(index))

    def _print_pair(self, prompt: Prompt, result: Result | None) -> None:
        problem = prompt.problem if result is None else result.error
        if self._form == "json":
            say_json(_record(prompt, result, problem))
        elif result is not None and self._form == "text" and (problem is None or result.tokens):
            say(f"--- {prompt.source} ({result.finish_reason})\n{_readable(result)}")
        elif result is not None and problem is None and (result.text is None or not self._line_open):
            say(_readable(result))
        self._end_line()
        if problem is not None:
            self.failed += 1
            complain(self._command, f"error: {prompt.source}: {one_line(problem)}")

    def _end_line(self) -> None:
        if self._line_open:
            self._line_open = False
            say()


def _readable(result: Result) -> str:
    return " ".join(map(str, result.tokens)) if result.text is None else result.text


def _record(prompt: Prompt, result: Result | None, problem: str | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "prompt": prompt.text,
        "prompt_ids": None if prompt.ids is None else list(prompt.ids),
        "token_ids": [] if result is None else list(result.tokens),
        "text": None if result is None else result.text,
        "finish_reason": "error" if result is None else result.finish_reason,
    }
    return record if problem is None else record | {"error": problem}
