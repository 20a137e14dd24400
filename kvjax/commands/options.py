"""Flags that commands share, and what they are turned into: a model, a cache, an engine."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from kvjax.commands.errors import CommandError
from kvjax.commands.text import one_line
from kvjax.engine import (
    Backing,
    ContiguousBacking,
    DraftModel,
    Engine,
    Event,
    ExtentBacking,
    PagedBacking,
    PromptLookup,
    Result,
    VirtualBacking,
)
from kvjax.engine.executables import power_of_two
from kvjax.engine.sequence import pages_for
from kvjax.extents import ExtentOptions
from kvjax.spec import CacheSpec

if TYPE_CHECKING:
    from kvjax.models import LoadedModel


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """An argparse type: integers from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return value

    return parse


def real_number(lowest: float, most: float = math.inf, *, exclusive: bool = False) -> Callable[[str], float]:
    """An argparse type: finite numbers from `lowest`, itself left out if `exclusive`, to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value > most or (value <= lowest if exclusive else value < lowest):
            lower = f"above {lowest:g}" if exclusive else f"of at least {lowest:g}"
            upper = "" if math.isinf(most) else f" and at most {most:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {lower}{upper}")
        return value

    return parse


def some_text(text: str) -> str:
    """An argparse type: any text but the empty one."""
    if not text:
        raise argparse.ArgumentTypeError("the text is empty")
    return text


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="smollm2",
        type=some_text,
        metavar="smollm2|DIR|FILE.gguf",
        help="the built-in SmolLM2-135M-Instruct, a Hugging Face directory, or a GGUF file (default: smollm2)",
    )


def add_cache_flags(parser: argparse.ArgumentParser, *, num_pages_default: str, burst: int = 16) -> None:
    """Flags of the cache and of batching."""
    group = parser.add_argument_group("cache and batching (these change speed and memory, never a token)")
    group.add_argument(
        "--cache",
        choices=("paged", "extents", "virtual", "contiguous"),
        default="paged",
        help="pages on demand; the same, kept side by side and moved together; contiguous addresses with memory on "
        "demand (Linux, CPU); or one fixed span a request (default: paged)",
    )
    group.add_argument(
        "--num-pages", type=whole_number(1, 2**31 - 1), metavar="N", help=f"pages in the pool ({num_pages_default})"
    )
    group.add_argument(
        "--page-size",
        type=whole_number(1, 2**20),
        default=16,
        metavar="P",
        help="token positions a page; with --cache virtual at least so many (default: %(default)s)",
    )
    group.add_argument(
        "--max-seqs",
        type=whole_number(1, 2**16),
        default=16,
        metavar="B",
        help="requests that run at once (default: %(default)s)",
    )
    group.add_argument(
        "--chunk",
        type=whole_number(1, 2**20),
        default=64,
        metavar="T",
        help="tokens of a step in which prompts are read (default: %(default)s)",
    )
    group.add_argument(
        "--burst",
        type=whole_number(1, 2**16),
        default=burst,
        metavar="N",
        help="decode steps in one device call (default: %(default)s)",
    )
    group.add_argument(
        "--draft",
        metavar="lookup|MODEL",
        help="guess tokens ahead, from the text so far or with a smaller model of the same tokenizer (default: no)",
    )
    group.add_argument(
        "--draft-tokens",
        type=whole_number(1, 64),
        default=4,
        metavar="K",
        help="guesses in a step (default: %(default)s)",
    )
    group.add_argument(
        "--swap",
        type=whole_number(0, 2**24),
        default=0,
        metavar="MIB",
        help="host memory for the pages of requests that give way; without room there they are computed again "
        "(default: %(default)s)",
    )


def load_model(name: str, flag: str = "--model") -> LoadedModel:
    """The model that a flag names.

    Raises:
      CommandError: it cannot be found or read, or a package it needs is missing.
    """
    from kvjax.models import load

    try:
        return load(name)
    except ModuleNotFoundError as error:
        raise CommandError(f"running models needs {error.name}: pip install 'kvjax[demo]'") from error
    except (ValueError, OSError) as error:
        raise CommandError(f"{flag} {one_line(error)}") from error
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        raise CommandError(f"{flag} {name}: there is no room for it: {one_line(error)}") from error


def choose_backing(options: argparse.Namespace, *, spec: CacheSpec, needs: Sequence[int], max_context: int) -> Backing:
    """The cache that the flags ask for.

    Args:
      options: parsed `add_cache_flags`.
      spec: of the model.
      needs: the most tokens each request can come to hold.
      max_context: of the model.

    Tables and spans are as long as these need: a model's files may speak of a context that no memory holds.  Without
    --num-pages the pool has room for the largest `max_seqs` requests together, so that none is ever preempted.
    """
    context = min(max_context, max(needs, default=1))
    if options.cache == "contiguous":
        if options.num_pages is not None:
            raise CommandError("--num-pages sizes the pool of a paged cache; leave it out with --cache contiguous")
        return ContiguousBacking(rows=options.max_seqs, max_context=context)
    width = min(max_context, power_of_two(context))  # of few sizes: a compiled step is for one
    together = [min(need, context) for need in sorted(needs, reverse=True)[: options.max_seqs]]
    if options.cache in ("paged", "extents"):
        enough = max(1, sum(pages_for(need, options.page_size) for need in together))
        sizes = (options.num_pages or enough, options.page_size, width)
        if options.cache == "paged":
            return PagedBacking(*sizes)
        # What comes back from the host goes wherever there are pages, and must not lie in too many runs.
        most_runs = pages_for(width, options.page_size) if options.swap else None
        return ExtentBacking(*sizes, extents=ExtentOptions(max_runs=most_runs))
    # What a burst may take is mapped before it begins, and what the next may take while it runs.
    burst = options.burst * (1 if options.draft is None else options.draft_tokens + 1)
    try:
        virtual = VirtualBacking(spec, 1, width, options.page_size * spec.bytes_per_token, lookahead=burst)
    except (NotImplementedError, OSError) as error:
        raise CommandError(f"--cache virtual: {one_line(error)}") from error
    enough = sum(pages_for(min(need + burst, width), virtual.page_size) for need in together)
    return replace(virtual, num_pages=options.num_pages or max(1, enough))


def make_engine(options: argparse.Namespace, loaded: LoadedModel, backing: Backing, **settings: Any) -> Engine:
    """An engine as the flags ask for.

    Raises:
      CommandError: the sizes are refused, or the memory is not there.
    """
    decode = None if loaded.tokenizer is None else loaded.tokenizer.decode
    if options.swap:
        settings |= {"preemption": "swap", "host_bytes": options.swap << 20}
    if options.draft == "lookup":
        settings["drafter"] = PromptLookup(tokens=options.draft_tokens)
    elif options.draft is not None:
        settings["drafter"] = DraftModel(load_model(options.draft, flag="--draft").model, tokens=options.draft_tokens)
    try:
        return Engine(
            loaded.model,
            backing,
            max_seqs=options.max_seqs,
            chunk=options.chunk,
            burst=options.burst,
            decode=decode,
            **settings,
        )
    except (ValueError, NotImplementedError, OSError, jax.errors.JaxRuntimeError) as error:
        raise CommandError(f"the cache cannot be made: {one_line(error)}") from error


def run_engine(engine: Engine, on_event: Callable[[Event], None]) -> list[Result]:
    """`engine.run`; CommandError if the device fails, by want of memory most of all."""
    try:
        return engine.run(on_event)
    except jax.errors.JaxRuntimeError as error:
        raise CommandError(f"the device failed: {one_line(error)}") from error


def changed(options: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """The same options but for `changes`."""
    return argparse.Namespace(**(vars(options) | changes))
