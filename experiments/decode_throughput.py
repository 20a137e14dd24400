"""Decode tokens a second: a burst of steps in one device call, against one call a step, and with drafts.

    python -m experiments.decode_throughput [--models smollm2,tests/fixtures/tiny-llama] [--json FILE]

Each model decodes from prompts that are already in the cache; prefill and compilation are not in the time.  Burst 1 is
one dispatch a step: the host reads the tokens, plans and calls again.  Runs of all settings take turns within each
repeat; medians over repeats.  Every setting must give the same tokens.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib
import numpy as np
from absl import app, flags
from tqdm import tqdm

from experiments.figures import write_figures
from kvjax.commands.demo_prompts import QUESTIONS
from kvjax.engine import Drafter, DraftModel, Engine, NoDrafts, PagedBacking, PromptLookup, Request
from kvjax.models import LoadedModel, load

MODELS = flags.DEFINE_list("models", ["smollm2", "tests/fixtures/tiny-llama"], "Models, as `kvjax generate --model`.")
ROWS = flags.DEFINE_list("rows", ["1", "4", "16"], "Sequences decoded at once.")
BURSTS = flags.DEFINE_list("bursts", ["1", "4", "16", "64"], "Steps in one device call; the first is compared with.")
DRAFTS = flags.DEFINE_integer("drafts", 4, "Drafts a step of the speculative settings.", lower_bound=1)
DRAFT_MODEL = flags.DEFINE_string("draft_model", None, "Also draft with this model; needs the same token ids.")
TOKENS = flags.DEFINE_integer("tokens", 65, "Tokens to generate; the first comes with the prompt.", lower_bound=2)
REPEATS = flags.DEFINE_integer("repeats", 5, "Measured runs of each setting.", lower_bound=1)
JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")


@dataclass(frozen=True)
class Setting:
    """One way of decoding."""

    name: str
    burst: int
    drafter: Drafter


class Subject:
    """A setting's engine, which serves the same prompts again and again."""

    def __init__(self, loaded: LoadedModel, setting: Setting, prompts: Sequence[tuple[int, ...]]) -> None:
        context = max(map(len, prompts)) + TOKENS.value
        pages = -(-context // 16) * len(prompts)
        self.setting, self.prompts = setting, prompts
        self.engine = Engine(
            loaded.model,
            PagedBacking(pages, 16, context),
            max_seqs=len(prompts),
            chunk=256,
            burst=setting.burst,
            max_prefixes=0,
            drafter=setting.drafter,
            smallest_bucket=len(prompts),
        )

    def run(self) -> tuple[float, list[tuple[int, ...]]]:
        """(decode tokens a second, the tokens of each prompt) of one run, compilation left out."""
        engine = self.engine
        ids = [engine.submit(Request(prompt, max_new_tokens=TOKENS.value)) for prompt in self.prompts]
        begun: set[int] = set()
        before = 0
        while len(begun) < len(ids):
            events = engine.step()
            begun |= {event.id for event in events}
            before += sum(len(event.tokens) for event in events)
        compiling, start = engine.metrics().compile_seconds, time.perf_counter()
        engine.run()
        seconds = time.perf_counter() - start - (engine.metrics().compile_seconds - compiling)
        tokens = [engine.results[number].tokens for number in ids]
        return (sum(map(len, tokens)) - before) / seconds, tokens


def prompts_of(loaded: LoadedModel, number: int) -> list[tuple[int, ...]]:
    """Real questions where there is a tokenizer, random ids elsewhere."""
    if loaded.tokenizer is not None:
        texts = [QUESTIONS[index % len(QUESTIONS)].text for index in range(number)]
        return [tuple(loaded.tokenizer.encode(text)) for text in texts]
    draw = np.random.default_rng(0)
    return [tuple(draw.integers(0, loaded.model.vocabulary, 20).tolist()) for _ in range(number)]


def settings() -> list[Setting]:
    """What is compared: the bursts without drafts, and the longest with them."""
    bursts = [int(burst) for burst in BURSTS.value]
    found = [Setting(f"burst {burst}", burst, NoDrafts()) for burst in bursts]
    longest = max(bursts)
    found.append(Setting(f"burst {longest}, prompt lookup", longest, PromptLookup(tokens=DRAFTS.value)))
    if DRAFT_MODEL.value:
        drafter = DraftModel(load(DRAFT_MODEL.value).model, tokens=DRAFTS.value)
        found.append(Setting(f"burst {longest}, draft model", longest, drafter))
    return found


def measure(name: str, rows: int, bar: tqdm) -> list[dict[str, Any]]:
    """One record a setting."""
    loaded = load(name)
    subjects = [Subject(loaded, setting, prompts_of(loaded, rows)) for setting in settings()]
    speeds: list[list[float]] = [[] for _ in subjects]
    expected: list[tuple[int, ...]] | None = None
    for repeat in range(REPEATS.value + 1):  # the first round compiles
        for subject, measured in zip(subjects, speeds, strict=True):
            speed, tokens = subject.run()
            expected = tokens if expected is None else expected
            if tokens != expected:
                raise RuntimeError(f"{subject.setting.name} changed the tokens of {name} with {rows} rows")
            if repeat:
                measured.append(speed)
            bar.update()
    records = []
    for subject, measured in zip(subjects, speeds, strict=True):
        metrics = subject.engine.metrics()
        records.append(
            {
                "model": loaded.name,
                "rows": rows,
                "setting": subject.setting.name,
                "tokens_per_second": statistics.median(measured),
                "slowest": min(measured),
                "fastest": max(measured),
                "against_first": statistics.median(measured) / statistics.median(speeds[0]),
                "drafted": metrics.drafted_tokens,
                "accepted": metrics.accepted_tokens,
            }
        )
    return records


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    device = jax.devices()[0]
    print(f"{device.device_kind}, {platform.machine()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
    rows = [int(number) for number in ROWS.value]
    total = len(MODELS.value) * len(rows) * len(settings()) * (REPEATS.value + 1)
    records = []
    with tqdm(total=total, unit="run", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        for name in MODELS.value:
            for number in rows:
                records += measure(name, number, bar)
    print(
        f"{'model':28s} {'rows':>4} {'setting':26s} {'tokens/s':>10} {'slowest – fastest':>20} {'×':>6} {'accepted':>9}"
    )
    for record in records:
        accepted = f"{record['accepted'] / record['drafted']:9.0%}" if record["drafted"] else ""
        spread = f"{record['slowest']:,.1f} – {record['fastest']:,.1f}"
        print(
            f"{record['model']:28s} {record['rows']:>4} {record['setting']:26s} {record['tokens_per_second']:>10,.1f} "
            f"{spread:>20} {record['against_first']:>6.2f} {accepted}"
        )
    if JSON.value:
        write_figures(JSON.value, tokens=TOKENS.value, repeats=REPEATS.value, records=records)


if __name__ == "__main__":
    app.run(main)
