"""`kvjax generate --num-beams N`: continue prompts by beam search."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax

from kvjax.commands.errors import CommandError
from kvjax.commands.interrupts import Interrupted
from kvjax.commands.options import whole_number
from kvjax.commands.output import complain, say, say_json
from kvjax.commands.prompts import Prompt
from kvjax.commands.text import one_line
from kvjax.engine import BeamOptions, BeamResult, BeamSearch, Hypothesis
from kvjax.engine.beams import EarlyStopping
from kvjax.extents import ExtentOptions
from kvjax.pages import Status

if TYPE_CHECKING:
    from kvjax.models import LoadedModel

STOPPING: dict[str, EarlyStopping] = {"false": False, "true": True, "never": "never"}
OF_SAMPLING: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
    "stop": [],
    "samples": 1,
}
OF_BEAMS: dict[str, Any] = {"length_penalty": 1.0, "early_stopping": "false", "num_return_sequences": 1}
"""Flags that mean nothing with beams, and nothing without them, with their defaults."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of beam search."""
    group = parser.add_argument_group(
        "beam search (as in Hugging Face transformers)",
        'With --json a line also has "sequences": every answer with its "score", the best first.',
    )
    most = 1024
    group.add_argument(
        "--num-beams", type=whole_number(1, most), default=1, metavar="N", help="1 is no beam search (default: 1)"
    )
    group.add_argument(
        "--length-penalty",
        type=_finite,
        default=1.0,
        metavar="X",
        help="a score is the sum of log-probabilities / length ** X (default: 1)",
    )
    group.add_argument(
        "--early-stopping",
        choices=tuple(STOPPING),
        default="false",
        help="stop with N finished answers: at once, when better ones are unlikely, or impossible (default: false)",
    )
    group.add_argument(
        "--num-return-sequences",
        type=whole_number(1, most),
        default=1,
        metavar="K",
        help="answers a prompt, at most N (default: 1)",
    )


def asked_for(options: argparse.Namespace) -> bool:
    """Whether there are beams to search; CommandError for flags that go with beams only."""
    if options.num_beams > 1:
        return True
    _refuse(options, OF_BEAMS, "needs --num-beams of at least 2")
    return False


def run(options: argparse.Namespace, loaded: LoadedModel, prompts: Sequence[Prompt]) -> int:
    """Answers prompts in order, each as soon as its turn is complete; the exit status."""
    how = _search_options(options, loaded)
    usable = [index for index, prompt in enumerate(prompts) if prompt.problem is None]
    outcomes: dict[int, BeamResult | str] = {
        index: prompt.problem for index, prompt in enumerate(prompts) if prompt.problem is not None
    }
    told = failed = 0
    try:
        for place, outcome in _search(options, loaded, [prompts[index].ids or () for index in usable], how):
            outcomes[usable[place]] = outcome
            while told in outcomes:
                failed += _tell(options, loaded, prompts[told], outcomes[told])
                told += 1
    except Interrupted as interrupt:
        interrupt.note = f"{len(prompts) - told} of {len(prompts)} prompts not answered"
        raise
    for index in range(told, len(prompts)):
        failed += _tell(options, loaded, prompts[index], outcomes[index])
    return 1 if failed else 0


def _search_options(options: argparse.Namespace, loaded: LoadedModel) -> BeamOptions:
    _refuse(options, OF_SAMPLING, "does not go with --num-beams: beam search samples nothing")
    if options.cache not in ("paged", "extents"):
        raise CommandError(f"--num-beams needs a paged cache; leave out --cache {options.cache}")
    _refuse(options, {"draft": None, "swap": 0}, "does not go with --num-beams: its beams neither draft nor give way")
    try:
        return BeamOptions(
            num_beams=options.num_beams,
            max_new_tokens=options.max_new_tokens,
            length_penalty=options.length_penalty,
            early_stopping=STOPPING[options.early_stopping],
            num_return_sequences=options.num_return_sequences,
            eos=loaded.eos,
        )
    except ValueError as error:
        raise CommandError(one_line(error)) from error


def _refuse(options: argparse.Namespace, defaults: dict[str, Any], why: str) -> None:
    """CommandError if one of these flags was given another value than its default."""
    for name, default in defaults.items():
        if getattr(options, name) != default:
            raise CommandError(f"--{name.replace('_', '-')} {why}")


def _search(
    options: argparse.Namespace, loaded: LoadedModel, prompts: Sequence[tuple[int, ...]], how: BeamOptions
) -> Iterator[tuple[int, BeamResult | str]]:
    """(index, result or what is wrong) of every prompt, a batch at a time; the refused of a batch come again later."""
    if not prompts:
        return
    together = min(options.max_seqs, len(prompts))
    context = min(loaded.model.max_context, max(map(len, prompts)) + how.max_new_tokens)
    rows = together * how.num_beams
    try:
        beams = BeamSearch(
            loaded.model,
            rows=rows,
            num_pages=options.num_pages or rows * -(-context // options.page_size),
            page_size=options.page_size,
            max_context=context,
            chunk=options.chunk,
            extents=ExtentOptions() if options.cache == "extents" else None,
        )
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise CommandError(f"the cache cannot be made: {one_line(error)}") from error
    problems = {index: beams.why_not(prompt, how) for index, prompt in enumerate(prompts)}
    yield from ((index, problem) for index, problem in problems.items() if problem is not None)
    waiting = [index for index, problem in problems.items() if problem is None]
    while waiting:
        batch = waiting[:together]
        try:
            results = beams.run([prompts[index] for index in batch], how).results
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            raise CommandError(f"the search cannot be run: {one_line(error)}") from error
        served = [index for index, result in zip(batch, results, strict=True) if result.status == Status.OK]
        if not served and together > 1:
            together = 1  # one of them is more than the pool holds; each by itself shows which
            continue
        for index, result in zip(batch, results, strict=True):
            if index in served or together == 1:
                yield index, result
                waiting.remove(index)


def _tell(options: argparse.Namespace, loaded: LoadedModel, prompt: Prompt, outcome: BeamResult | str) -> Literal[0, 1]:
    """Prints the answers to a prompt, or what is wrong with it; 1 if something is."""
    problem = outcome if isinstance(outcome, str) else outcome.error
    hypotheses = () if isinstance(outcome, str) else outcome.hypotheses
    if problem is not None:
        complain(options.command, f"error: {prompt.source}: {one_line(problem)}")
    if options.json:
        say_json(_record(loaded, prompt, hypotheses, problem))
    else:
        for hypothesis in hypotheses:
            say(f"--- {prompt.source} (score {hypothesis.score:.4f})\n{_readable(loaded, hypothesis)}")
    return 0 if problem is None else 1


def _record(
    loaded: LoadedModel, prompt: Prompt, hypotheses: Sequence[Hypothesis], problem: str | None
) -> dict[str, Any]:
    """The JSON line of a prompt: the best answer as `generate` has it elsewhere, and all of them with their scores."""
    answers = [
        {
            "token_ids": list(hypothesis.tokens),
            "text": None if loaded.tokenizer is None else loaded.tokenizer.decode(hypothesis.tokens),
            "finish_reason": "stop" if hypothesis.tokens[-1] in loaded.eos else "length",
            "score": hypothesis.score,
        }
        for hypothesis in hypotheses
    ]
    best = answers[0] if answers else {"token_ids": [], "text": None, "finish_reason": "error"}
    record = {
        "prompt": prompt.text,
        "prompt_ids": None if prompt.ids is None else list(prompt.ids),
        **{name: best[name] for name in ("token_ids", "text", "finish_reason")},
        "sequences": answers,
    }
    return record if problem is None else record | {"error": problem}


def _readable(loaded: LoadedModel, hypothesis: Hypothesis) -> str:
    if loaded.tokenizer is None:
        return " ".join(map(str, hypothesis.tokens))
    return loaded.tokenizer.decode(hypothesis.tokens)


def _finite(text: str) -> float:
    """An argparse type: any number but NaN and the infinities."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value
