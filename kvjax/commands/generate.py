"""`kvjax generate`: continue one prompt, or a file of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvjax.commands import beams
from kvjax.commands.options import (
    add_cache_flags,
    add_model_flag,
    changed,
    choose_backing,
    load_model,
    make_engine,
    one_line,
    real_number,
    some_text,
    whole_number,
)
from kvjax.commands.prompts import Prompt, check_text, read_prompts
from kvjax.engine import Event, Request, Result

if TYPE_CHECKING:
    from kvjax.models import LoadedModel

DESCRIPTION = """\
Continue prompts with a language model, many at once, out of one KV cache.

The tokens of a prompt depend on the prompt, the sampling flags and the seed alone: not on the other prompts, and not
on any flag of the cache."""

EXAMPLES = """\
examples:
  kvjax generate --prompt "The capital of France is" --max-new-tokens 16
  kvjax generate --prompt "Write a haiku about pages." --chat --temperature 0.8 --top-p 0.95 --seed 7
  kvjax generate --prompt "A haiku about rain:" --num-beams 4 --num-return-sequences 2
  kvjax generate --prompts prompts.jsonl --json > answers.jsonl
  kvjax generate --model ./my-llama --prompts ids.jsonl --json --num-pages 64 --page-size 16

a line of prompts.jsonl is {"prompt": "Once upon a time"} or {"prompt_ids": [1, 504, 2]}; token ids also serve a model
without a tokenizer.  With --json every line is answered, in the same order, by one line
  {"prompt": …, "prompt_ids": …, "token_ids": …, "text": …, "finish_reason": "stop"|"length"|"error"}
A line that cannot be served has "error" beside it saying why; the others are answered all the same, and the exit
status is 1."""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="continue a prompt, or a file of prompts",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_model_flag(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    source.add_argument("--prompts", metavar="FILE.jsonl", help="a file of prompts, one JSON object a line")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="a prompt is what a user says to the chat model")
    form.add_argument("--raw", action="store_true", help="a prompt is tokenised as it stands (default)")
    parser.add_argument("--json", action="store_true", help="one JSON line a prompt")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-new-tokens", type=whole_number(1), default=64, metavar="N", help="at most (default: %(default)s)"
    )
    sampling.add_argument(
        "--temperature",
        type=real_number(0),
        default=0.0,
        metavar="T",
        help="0 is greedy; 1 the model's own distribution (default: 0)",
    )
    sampling.add_argument(
        "--top-k", type=whole_number(0, 2**31 - 1), default=0, metavar="K", help="0 is all tokens (default: 0)"
    )
    sampling.add_argument(
        "--top-p", type=real_number(0, 1, exclusive=True), default=1.0, metavar="P", help="nucleus (default: 1)"
    )
    sampling.add_argument(
        "--seed", type=whole_number(0, 2**32 - 1), default=0, metavar="S", help="of each prompt (default: 0)"
    )
    sampling.add_argument(
        "--stop", type=some_text, action="append", default=[], metavar="TEXT", help="end before it; may be repeated"
    )
    beams.add_flags(parser)
    add_cache_flags(parser, num_pages_default="default: as many as never to preempt anybody")


def run(options: argparse.Namespace) -> int:
    prompts = [check_text("--prompt", options.prompt)] if options.prompts is None else read_prompts(options.prompts)
    loaded = load_model(options.model)
    prompts = [_tokenise(prompt, loaded, chat=options.chat) for prompt in prompts]
    if beams.asked_for(options):
        return beams.run(options, loaded, prompts)
    usable = [prompt for prompt in prompts if prompt.problem is None]
    if loaded.tokenizer is None and options.stop:
        return _fail(options, "--stop needs a tokenizer, and this model has none")
    stream = options.prompts is None and not options.json
    results = _serve(options, loaded, [prompt.ids or () for prompt in usable], stream=stream)
    answers: dict[str, Result] = {prompt.source: result for prompt, result in zip(usable, results, strict=True)}
    failed = 0
    for prompt in prompts:
        result = answers.get(prompt.source)
        problem = prompt.problem if result is None else result.error
        if problem is not None:
            failed += 1
            _fail(options, f"{prompt.source}: {one_line(problem)}")
        if options.json:
            print(json.dumps(_record(prompt, result, problem), ensure_ascii=False), flush=True)
        elif result is not None and not stream:
            print(f"--- {prompt.source} ({result.finish_reason})\n{_readable(result)}", flush=True)
    return 1 if failed else 0


def _tokenise(prompt: Prompt, loaded: LoadedModel, *, chat: bool) -> Prompt:
    """The prompt with its token ids, or with what is wrong with it."""
    if prompt.text is None:
        return prompt
    if loaded.tokenizer is None:
        return Prompt(prompt.source, prompt.text, problem=f'{loaded.name} has no tokenizer; give "prompt_ids"')
    try:
        if chat:
            ids = loaded.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        else:
            ids = loaded.tokenizer.encode(prompt.text)
    except ValueError as error:
        return Prompt(prompt.source, prompt.text, problem=str(error))
    problem = None if ids else "the text has no tokens"
    return Prompt(prompt.source, prompt.text, tuple(ids), problem)


def _serve(
    options: argparse.Namespace, loaded: LoadedModel, prompts: Sequence[tuple[int, ...]], *, stream: bool
) -> list[Result]:
    """A result for each prompt, in order."""
    if not prompts:
        return []
    options = changed(options, max_seqs=min(options.max_seqs, len(prompts)))
    needs = [len(prompt) + options.max_new_tokens for prompt in prompts]
    backing = choose_backing(options, needs=needs, max_context=loaded.model.max_context)
    engine = make_engine(options, loaded, backing, max_prefixes=0)
    for prompt in prompts:
        engine.submit(
            Request(
                prompt,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=options.seed,
                stop=tuple(options.stop),
                eos=loaded.eos,
            )
        )
    return engine.run(_print_piece if stream else None)


def _print_piece(event: Event) -> None:
    """Shows the only request's text as it comes."""
    if event.text:
        print(event.text, end="", flush=True)
    if event.result is not None and event.result.error is None:
        print("" if event.result.text is not None else _readable(event.result), flush=True)


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


def _fail(options: argparse.Namespace, message: str) -> int:
    print(f"kvjax {options.command}: error: {message}", file=sys.stderr)
    return 1
