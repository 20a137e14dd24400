"""`kvjax plan`: how many tokens and sequences a deployment holds, before it is paid for."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from kvjax.architecture import Architecture, config_of_gguf, read_architecture
from kvjax.capacity import (
    FORMATS,
    WEIGHT_BITS,
    Deployment,
    Draft,
    Parallelism,
    Weights,
    Workload,
    advise,
    make_plan,
    weight_bytes,
)
from kvjax.capacity.fragmentation import COPY_OVERHEAD_BYTES
from kvjax.commands.errors import CommandError
from kvjax.commands.options import real_number, whole_number
from kvjax.commands.output import complain, say
from kvjax.commands.plan_picture import draw
from kvjax.commands.plan_record import limit, record
from kvjax.commands.plan_report import report
from kvjax.commands.plan_trace import Trace, read_trace
from kvjax.commands.text import one_line
from kvjax.models.errors import ModelError
from kvjax.models.json_file import read_object
from kvjax.spec import FULL_ATTENTION_FAMILIES

DESCRIPTION = """\
Work out a deployment from a model's config alone: bytes a token and layer kind, the pool, its pages, how many
sequences run at once, what limits, and where a device's memory goes.  All figures are for one device unless they say
otherwise."""

EXAMPLES = """\
examples:
  kvjax plan config.json --hbm 80GB --tp 4
  kvjax plan ./my-model --hbm 16GiB --platform tpu --weights int8 --kv-dtype fp8 --context 32768 --json
  kvjax plan model.gguf --hbm 24GB --trace lengths.jsonl --advise --png plan.png

GB is 10^9 bytes and GiB 2^30.  A line of lengths.jsonl is a number of tokens, or an object
  {"prompt_tokens": 1200, "output_tokens": 300, "shared_prefix_tokens": 1000}
where shared_prefix_tokens, which is optional, says how much of the prompt an earlier line had in the same place."""

UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
LARGEST = 2**60
"""Sizes and counts beyond this are slips of the hand."""
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""A config's dtype → a weight format."""
QUANTISED = {"fp8": "fp8", "mxfp4": "mxfp4"}
"""A config's quantization_config.quant_method → a weight format."""


def byte_size(text: str) -> int:
    """An argparse type: "80GB", "16GiB", "4096"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text)
    size = float(match[1]) * UNITS[match[2]] if match is not None and match[2] in UNITS else 0.0
    if not 1 <= size <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 80GB, 16GiB or 4096")
    return int(size)


def byte_rate(text: str) -> int:
    """An argparse type: "25GB/s"."""
    return byte_size(text.removesuffix("/s"))


def page_size(text: str) -> int | None:
    """An argparse type: a whole number, or "auto"."""
    return None if text == "auto" else whole_number(1, 2**20)(text)


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="how many tokens and sequences fit a device",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    positive = whole_number(1, LARGEST)
    parser.add_argument("config", metavar="CONFIG", help="a config.json, a directory that has one, or a .gguf file")
    parser.add_argument("--hbm", type=byte_size, required=True, metavar="SIZE", help="memory of one device, like 80GB")
    for flag, what in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"), ("dp", "data")):
        parser.add_argument(f"--{flag}", type=positive, default=1, metavar="N", help=f"{what} parallelism (default: 1)")
    parser.add_argument("--platform", choices=("gpu", "tpu", "cpu"), default="gpu", help="tpu pads rows (default: gpu)")
    parser.add_argument("--weights", choices=WEIGHT_BITS, help="format of the weights (default: what the config says)")
    parser.add_argument("--parameters", type=real_number(1, LARGEST), metavar="N", help="number of weights, like 6.7e9")
    parser.add_argument("--kv-dtype", choices=("auto", *FORMATS), default="auto", help="format of the cache")
    parser.add_argument("--context", type=positive, metavar="T", help="longest sequence (default: the model's)")
    parser.add_argument("--trace", metavar="FILE", help="JSON lines with the lengths to plan for")
    parser.add_argument(
        "--page-size",
        type=page_size,
        metavar="P|auto",
        help="tokens a page (default: auto, the size of the kernels nearest to the knee)",
    )
    parser.add_argument("--chunk", type=positive, default=8192, metavar="T", help="tokens of a step (default: 8192)")
    parser.add_argument(
        "--slack", type=real_number(0, 0.9), default=0.05, metavar="F", help="share the allocator loses (default: 0.05)"
    )
    parser.add_argument("--draft", metavar="CONFIG", help="config of a draft model, cached beside the model")
    parser.add_argument("--draft-parameters", type=real_number(1, LARGEST), metavar="N", help="number of its weights")
    advice = parser.add_argument_group("advice")
    advice.add_argument("--advise", action="store_true", help="say what is worth switching on, and what is not")
    advice.add_argument("--concurrency", type=positive, metavar="N", help="sequences wanted at once")
    advice.add_argument("--network", type=byte_rate, metavar="RATE", help="from a remote tier, like 25GB/s")
    advice.add_argument("--prefill-rate", type=real_number(0, exclusive=True), metavar="T", help="tokens a second")
    advice.add_argument("--quality-evaluated", action="store_true", help="lossy caches were evaluated on your task")
    advice.add_argument(
        "--copy-overhead",
        type=byte_size,
        default=COPY_OVERHEAD_BYTES,
        metavar="SIZE",
        help="fixed cost of copying a page, in bytes that stream in that time (default: 4KiB, an assumption)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.add_argument("--png", metavar="FILE", help="also draw the ledger and the page sizes (needs kvjax[plots])")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the plan; the exit status is 1 if not even one sequence fits."""
    config, stored = _read_config(options.config)
    architecture = _architecture(options.config, config)
    trace = Trace() if options.trace is None else read_trace(options.trace)
    context = options.context or architecture.max_context
    if context is None:
        raise CommandError(f"{options.config}: does not say how long a context may be; pass --context")
    try:
        deployment = Deployment(
            architecture=architecture,
            weights=_weights(options.config, config, architecture, options.weights, options.parameters, stored),
            hbm=options.hbm,
            context=context,
            kv_format=architecture.kv_format if options.kv_dtype == "auto" else options.kv_dtype,
            parallel=Parallelism(options.tp, options.cp, options.pp, options.dp),
            page_size=options.page_size,
            lengths=trace.lengths,
            platform=options.platform,
            chunk=options.chunk,
            slack=options.slack,
            draft=None if options.draft is None else _draft(options),
            staging=options.network is not None,
            scanned=architecture.model_type in FULL_ATTENTION_FAMILIES,
            copy_overhead_bytes=options.copy_overhead,
        )
        plan = make_plan(deployment)
        workload = Workload(
            lengths=trace.lengths,
            prompts=trace.prompts,
            shared=trace.shared,
            concurrency=options.concurrency,
            network=options.network,
            prefill_rate=options.prefill_rate,
            quality_evaluated=options.quality_evaluated,
        )
        advice = advise(plan, workload) if options.advise else ()
    except ValueError as error:
        raise CommandError(one_line(error)) from error
    if options.png is not None:
        try:
            draw(plan, options.png, title=Path(options.config).name)
        except (RuntimeError, OSError) as error:
            raise CommandError(f"--png {options.png}: {one_line(error)}") from error
    if options.json:
        say(json.dumps(record(plan, advice), indent=2, ensure_ascii=False))
    else:
        say(report(plan, advice, title=options.config))
    if plan.max_sequences:
        return 0
    complain(options.command, f"error: not one sequence fits in --hbm {options.hbm}: {limit(plan)}")
    return 1


def _read_config(name: str) -> tuple[dict[str, Any], int | None]:
    """(the config, bytes of the weights beside it, which only a GGUF file tells)."""
    path = Path(name)
    if path.suffix == ".gguf":
        try:
            from kvjax.models.gguf_file import open_gguf
        except ModuleNotFoundError as error:
            raise CommandError(f"reading GGUF files needs {error.name}: pip install 'kvjax[demo]'") from error
        try:
            file = open_gguf(path)
            return config_of_gguf(file.metadata), sum(tensor.size for tensor in file.tensors.values())
        except ModelError as error:
            raise CommandError(one_line(error)) from error
        except ValueError as error:
            raise CommandError(f"{name}: {one_line(error)}") from error
    try:
        return read_object(path / "config.json" if path.is_dir() else path), None
    except ModelError as error:
        raise CommandError(one_line(error)) from error


def _architecture(name: str, config: dict[str, Any]) -> Architecture:
    try:
        return read_architecture(config)
    except ValueError as error:
        raise CommandError(f"{name}: {one_line(error)}") from error


def _weights(
    name: str,
    config: dict[str, Any],
    architecture: Architecture,
    form: str | None,
    parameters: float | None,
    stored: int | None,
) -> Weights:
    """The weights' bytes: what a file holds, or their number in a format."""
    if stored is not None and form is None and parameters is None:
        return Weights(stored, None, "GGUF", "sizes of the file's tensors")
    number = architecture.parameters if parameters is None else int(parameters)
    if number is None:
        reason = f"how many weights there are is not known ({architecture.parameters_note})"
        raise CommandError(f"{name}: {reason}; pass --parameters")
    form, said = (form, "--weights") if form is not None else _stated_format(name, config)
    counted = f"--parameters, {said}" if parameters is not None else f"{architecture.parameters_note}; {said}"
    return Weights(weight_bytes(number, form), number, form, counted)


def _stated_format(name: str, config: dict[str, Any]) -> tuple[str, str]:
    """The weight format that a config states, and where."""
    text = config.get("text_config")
    sections = (config, text) if isinstance(text, dict) else (config,)
    for section in sections:
        quantised = section.get("quantization_config")
        if quantised is not None:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            if not isinstance(method, str) or method not in QUANTISED:
                raise CommandError(f"{name}: quantization_config has quant_method={method!r}; pass --weights")
            return QUANTISED[method], "config quantization_config"
    for section in sections:
        stated = section.get("dtype") or section.get("torch_dtype")
        if stated is None:
            continue
        if not isinstance(stated, str) or stated.removeprefix("torch.") not in DTYPES:
            raise CommandError(f"{name}: dtype {one_line(repr(stated))} is not known; pass --weights")
        return DTYPES[stated.removeprefix("torch.")], f"config dtype {stated}"
    return "bf16", "assumption: bf16, the config does not say"


def _draft(options: argparse.Namespace) -> Draft:
    config, stored = _read_config(options.draft)
    architecture = _architecture(options.draft, config)
    return Draft(architecture, _weights(options.draft, config, architecture, None, options.draft_parameters, stored))
