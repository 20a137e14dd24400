"""`kvjax generate`: continue one prompt, or a file of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvjax.commands import beams
from kvjax.commands.answers import Answers, Form
from kvjax.commands.errors import CommandError
from kvjax.commands.interrupts import Interrupted
from kvjax.commands.options import (
    add_cache_flags,
    add_model_flag,
    changed,
    choose_backing,
    load_model,
    make_engine,
    real_number,
    run_engine,
    some_text,
    whole_number,
)
from kvjax.commands.prompts import Prompt, check_text, read_prompts
from kvjax.commands.text import one_line
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
  kvjax generate --prompts prompts.jsonl --json > answers.jsonl
  kvjax generate --prompt "Once upon a time" --samples 4 --temperature 1
  kvjax generate --prompt "Once upon a time" --num-beams 4 --num-return-sequences 2
  kvjax generate --prompts prompts.jsonl --draft lookup
  kvjax generate --model ./my-llama --prompts ids.jsonl --json --num-pages 64 --page-size 16

a line of prompts.jsonl is {"prompt": "Once upon a time"} or {"prompt_ids": [1, 504, 2]}; token ids also serve a model
without a tokenizer.  With --json every line is answered, in the same order, by one line
  {"prompt": …, "prompt_ids": …, "token_ids": …, "text": …, "finish_reason": "stop"|"length"|"error"}
With --samples N there are N lines a prompt, of the seeds S, S + 1, …; with --num-beams one, of the best answer, with
"sequences" that holds all and their scores.
A line that cannot be served has "error" beside it saying why; the others are answered all the same, and the exit
status is 1.  Lines and answers are printed as they finish: Ctrl-C and SIGTERM lose nothing that is finished, say how
many prompts were not answered, and exit with 130 or 143."""


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
        "--max-new-tokens",
        type=whole_number(1, 2**31 - 1),
        default=64,
        metavar="N",
        help="at most (default: %(default)s)",
    )
    sampling.add_argument(
        "--temperature",
        type=real_number(0, 1e6),
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
    sampling.add_argument(
        "--samples",
        type=whole_number(1, 2**16),
        default=1,
        metavar="N",
        help="answers a prompt, which share its pages (default: 1)",
    )
    beams.add_flags(parser)
    add_cache_flags(parser, num_pages_default="default: as many as never to preempt anybody")


def run(options: argparse.Namespace) -> int:
    prompts = [check_text("--prompt", options.prompt)] if options.prompts is None else read_prompts(options.prompts)
    if beams.asked_for(options):
        loaded = load_model(options.model)
        return beams.run(options, loaded, [_tokenise(prompt, loaded, chat=options.chat) for prompt in prompts])
    if options.samples > options.max_seqs:
        raise CommandError(f"--samples {options.samples} run at once; give --max-seqs of at least as many")
    prompts = [sample for prompt in prompts for sample in _samples(prompt, options.samples)]
    form: Form = "json" if options.json else "stream" if len(prompts) == 1 and options.prompts is None else "text"
    answers = Answers(options.command, len(prompts), form)
    try:
        loaded = load_model(options.model)
        if loaded.tokenizer is None and options.stop:
            raise CommandError("--stop needs a tokenizer, and this model has none")
        _serve(options, loaded, [_tokenise(prompt, loaded, chat=options.chat) for prompt in prompts], answers)
    except Interrupted as interrupt:
        interrupt.note = f"{answers.unanswered} of {len(prompts)} prompts not answered"
        raise
    finally:
        answers.close()
    return 1 if answers.failed else 0


def _samples(prompt: Prompt, number: int) -> list[Prompt]:
    """The prompt once for each sample of it."""
    if number == 1:
        return [prompt]
    return [replace(prompt, source=f"{prompt.source}, sample {index + 1}") for index in range(number)]


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


def _serve(options: argparse.Namespace, loaded: LoadedModel, prompts: Sequence[Prompt], answers: Answers) -> None:
    """Settles every prompt."""
    usable: list[int] = []
    for index, prompt in enumerate(prompts):
        if prompt.problem is None:
            usable.append(index)
        else:
            answers.settle(index, prompt, None)
    if not usable:
        return
    options = changed(options, max_seqs=min(options.max_seqs, len(usable)))
    # The samples of a prompt stand together, and are usable or not together.
    requests = [_request(options, loaded, prompts[index].ids or ()) for index in usable[:: options.samples]]
    needs = [len(request.prompt) + request.max_new_tokens for request in requests]
    model = loaded.model
    backing = choose_backing(options, spec=model.spec, needs=needs, max_context=model.max_context)
    engine = make_engine(options, loaded, backing, max_prefixes=0)
    try:
        numbers = [number for request in requests for number in engine.submit_samples(request, options.samples)]
    except ValueError as error:
        raise CommandError(one_line(error)) from error
    index_of = dict(zip(numbers, usable, strict=True))

    def settle(result: Result) -> None:
        index = index_of[result.id]
        answers.settle(index, prompts[index], result)

    def follow(event: Event) -> None:
        answers.piece(event.text)
        if event.result is not None:
            settle(event.result)

    answers.show_progress()
    try:
        run_engine(engine, follow)
    finally:
        # An interrupt can come between a request's end and the telling of it.
        for result in engine.results.values():
            settle(result)


def _request(options: argparse.Namespace, loaded: LoadedModel, prompt: tuple[int, ...]) -> Request:
    return Request(
        prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=tuple(options.stop),
        eos=loaded.eos,
    )
