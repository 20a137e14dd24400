"""`kvjax demo`: sixteen prompts out of a paged cache, held against a contiguous one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.commands.compare import compare
from kvjax.commands.demo_prompts import QUESTIONS, SYSTEM
from kvjax.commands.demo_report import report, verdict
from kvjax.commands.errors import CommandError
from kvjax.commands.files import check_writable, write_file
from kvjax.commands.options import (
    add_cache_flags,
    add_model_flag,
    changed,
    choose_backing,
    load_model,
    make_engine,
    run_engine,
)
from kvjax.commands.output import say
from kvjax.commands.table import metrics_table
from kvjax.commands.text import one_line
from kvjax.engine import Event, Metrics, PageMap, Request, Result

if TYPE_CHECKING:
    from kvjax.models import LoadedModel

DESCRIPTION = """\
Answer sixteen questions at once out of a paged KV cache, with a shared system prompt, a pool too small for all of them
and three users who go away in the middle; then answer them again out of a contiguous cache and compare every token.

Writes a picture of who owned which page when, and all figures as JSON.  The exit status is 1 if a token differs or a
request could not be served."""

EXAMPLES = """\
examples:
  kvjax demo
  kvjax demo --num-pages 400           room for everybody: nobody is preempted
  kvjax demo --page-size 64 --burst 4  other pages and bursts, the same tokens
  kvjax demo --cache extents           pages kept side by side, and moved together when they are not
  kvjax demo --cache virtual           contiguous addresses, memory mapped as it is needed
  kvjax demo --model ./my-chat-model"""

POOL_SHARE = 0.42
"""The default pool as a part of what all requests together would fill: tight enough to see preemption."""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="sixteen prompts out of a paged cache, checked against a contiguous one",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_model_flag(parser)
    parser.add_argument("--png", default="out/demo.png", metavar="FILE", help="the picture (default: %(default)s)")
    parser.add_argument("--json", default="out/demo.json", metavar="FILE", help="the figures (default: %(default)s)")
    add_cache_flags(parser, num_pages_default=f"default: {POOL_SHARE:.0%}% of what all requests would fill", burst=8)


def run(options: argparse.Namespace) -> int:
    other = "contiguous" if options.cache == "paged" else "paged"
    has_pages = options.cache in ("paged", "extents")
    _check_files(options.png if has_pages else None, options.json)
    say(
        f"{len(QUESTIONS)} questions to {options.model}, answered out of a {options.cache} cache, then out of a "
        f"{other} one; every token is compared.\nWith the built-in model on two CPU cores that takes about a minute."
    )
    loaded = load_model(options.model)
    prompts = _tokenise(options.model, loaded)
    page_map = PageMap() if has_pages else None
    if options.cache != "contiguous" and options.num_pages is None:
        options = changed(options, num_pages=_tight_pool(options.page_size, prompts))
    served, metrics = _serve(options, loaded, prompts, cancelling=True, page_map=page_map)
    _print_answers(served)
    undisturbed = changed(options, cache=other, num_pages=None)
    expected, other_metrics = _serve(undisturbed, loaded, prompts, cancelling=False, page_map=None)

    comparison = compare(served, expected)
    results, figures = {options.cache: served, other: expected}, {options.cache: metrics, other: other_metrics}
    say(f"\n{metrics_table(figures)}\n")
    text = json.dumps(report(loaded.name, comparison, results, figures), indent=1, ensure_ascii=False) + "\n"
    write_file(options.json, lambda path: path.write_text(text, "utf-8", errors="backslashreplace"))
    say(f"figures:  {options.json}")
    say(verdict(comparison, results))
    if page_map is not None:
        write_file(options.png, lambda path: page_map.draw(path, title=f"Pages of {loaded.name} over time"))
        say(f"page map: {options.png}")
    return 0 if comparison.equal and not comparison.failed else 1


def _check_files(png: str | None, figures: str) -> None:
    """Refuses now, rather than after a minute of work, what could not be written then."""
    if png is not None and Path(png).resolve() == Path(figures).resolve() and not Path(png).is_char_device():
        raise CommandError(f"--png and --json are both {figures}; give them different files")
    for name in (png, figures):
        if name is not None:
            check_writable(name)


def _tokenise(model: str, loaded: LoadedModel) -> list[tuple[int, ...]]:
    if loaded.tokenizer is None:
        raise CommandError(f"--model {model}: it has no tokenizer, and the demo speaks text; see kvjax generate")
    try:
        return [
            tuple(
                loaded.tokenizer.encode_chat(
                    [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text}]
                )
            )
            for question in QUESTIONS
        ]
    except ValueError as error:
        raise CommandError(f"--model {model}: {one_line(error)}") from error


def _serve(
    options: argparse.Namespace,
    loaded: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    *,
    cancelling: bool,
    page_map: PageMap | None,
) -> tuple[list[Result], Metrics]:
    """Answers all questions; with `cancelling`, those whose users go away are cut short."""
    from tqdm import tqdm

    prefix = _common_prefix(prompts)
    options = changed(options, max_seqs=min(options.max_seqs, len(prompts)))
    backing = choose_backing(
        options,
        spec=loaded.model.spec,
        needs=[*_needs(prompts), len(prefix)],
        max_context=loaded.model.max_context,
    )
    engine = make_engine(options, loaded, backing, smallest_bucket=16, page_map=page_map)
    try:
        engine.add_prefix(prefix)
    except ValueError as error:
        raise CommandError(f"--model {options.model}: the questions' shared beginning: {one_line(error)}") from error
    for prompt, question in zip(prompts, QUESTIONS, strict=True):
        engine.submit(Request(prompt, max_new_tokens=question.max_new_tokens, eos=loaded.eos))

    received = [0] * len(prompts)
    total = sum(question.max_new_tokens for question in QUESTIONS)
    with tqdm(total=total, desc=f"{options.cache} cache", unit="token", disable=sys.stderr is None) as bar:

        def follow(event: Event) -> None:
            received[event.id] += len(event.tokens)
            bar.update(len(event.tokens))
            question = QUESTIONS[event.id]
            if cancelling and question.cancel_after is not None and received[event.id] >= question.cancel_after:
                engine.cancel(event.id)
            if event.result is not None:
                bar.total -= question.max_new_tokens - received[event.id]
                bar.set_postfix_str(f"{len(engine.results)} of {len(prompts)} done")

        results = run_engine(engine, follow)
    return results, engine.metrics()


def _common_prefix(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What all prompts begin with."""
    shortest = min(prompts, key=len)
    differs = (place for place, token in enumerate(shortest) if any(prompt[place] != token for prompt in prompts))
    return shortest[: next(differs, len(shortest))]


def _needs(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """The most tokens each request can come to hold."""
    return [len(prompt) + question.max_new_tokens for prompt, question in zip(prompts, QUESTIONS, strict=True)]


def _tight_pool(page_size: int, prompts: Sequence[tuple[int, ...]]) -> int:
    """Pages for a part of what all requests would fill, but enough for any one of them."""
    shared = len(_common_prefix(prompts)) // page_size
    own = [-(-need // page_size) - shared for need in _needs(prompts)]
    return max(shared + max(own) + 1, int(POOL_SHARE * (shared + 1 + sum(own))))


def _print_answers(results: Sequence[Result]) -> None:
    for question, result in zip(QUESTIONS, results, strict=True):
        say(f"\n[{result.id}] {question.text}")
        ending = {"cancelled": " … (cancelled)", "length": " …", "error": f" (error: {result.error})"}
        say(f"    {one_line(result.text or '')}{ending.get(result.finish_reason, '')}")
