"""The `kvjax` program when it is interrupted, and on streams that cannot take what it says."""

import gc
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kvjax import cli
from kvjax.commands import answers, interrupts
from kvjax.commands.interrupts import Interrupted, raising_interrupts
from kvjax.engine import Engine
from tests.engine.conftest import compile_once  # noqa: F401
from tests.test_cli import SMALL, lines, model, run, tiny  # noqa: F401

BATCH = ("--max-new-tokens", 12, "--max-seqs", 2, "--chunk", 8, "--burst", 4, "--num-pages", 24)


@pytest.fixture(autouse=True)
def signals_are_heard():
    """Whatever started the tests may have them ignored."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in interrupts.SIGNALS}
    yield
    for number, handler in before.items():
        assert signal.signal(number, handler) is signal.SIG_DFL  # the program leaves handlers as it finds them


@pytest.fixture
def prompts(tmp_path):
    """A long prompt, which is the last of the first two to be answered, and three short ones."""
    return lines(tmp_path / "prompts.jsonl", {"prompt_ids": [3, 7] * 80}, *({"prompt_ids": [one]} for one in range(3)))


def interrupt_after(monkeypatch, number, signal_number):
    """Raises a signal inside the step in which the `number`th request ends, before anybody is told of it."""
    step = Engine.step

    def interrupted_step(engine):
        events = step(engine)
        if len(engine.results) >= number:
            signal.raise_signal(signal_number)
        return events

    monkeypatch.setattr(Engine, "step", interrupted_step)


@pytest.mark.parametrize("signal_number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_loses_nothing_that_is_finished(run, tiny, prompts, monkeypatch, signal_number, status):  # noqa: F811
    whole = [json.loads(line) for line in run("generate", "--prompts", prompts, "--json", *BATCH)[1]]
    interrupt_after(monkeypatch, 2, signal_number)
    got, out, err = run("generate", "--prompts", prompts, "--json", *BATCH)
    records = [json.loads(line) for line in out]
    assert got == status and 2 <= len(records) < 4 and all(record in whole[1:] for record in records)
    assert err == [f"kvjax generate: interrupted: {4 - len(records)} of 4 prompts not answered"]
    got, out, err = run("generate", "--prompts", prompts, *BATCH)
    assert got == status and len(out) == 2 * len(records) and out[0].startswith(f"--- {prompts}:2 (length)")


def test_an_interrupt_ends_the_line_of_a_streamed_answer(run, tiny, monkeypatch):  # noqa: F811
    def stop(engine, on_event):
        for _ in range(3):
            for event in engine.step():
                on_event(event)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Engine, "run", stop)
    status, out, err = run("generate", "--prompt", "the cache", *SMALL)
    assert status == 130 and len(out) == 1 and out[0]
    assert err == ["kvjax generate: interrupted: 1 of 1 prompts not answered"]


def test_an_interrupted_demo_leaves_no_files(run, tiny, tmp_path, monkeypatch):  # noqa: F811
    interrupt_after(monkeypatch, 0, signal.SIGINT)
    status, _, err = run("demo", "--png", tmp_path / "map.png", "--json", tmp_path / "figures.json")
    assert status == 130 and err[-1] == "kvjax demo: interrupted" and list(tmp_path.iterdir()) == []


def test_answers_are_printed_as_they_end(run, tiny, prompts, monkeypatch):  # noqa: F811
    """The log of a run: steps, and what was printed between them."""
    log = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: (log.append("."), step(engine))[1])
    monkeypatch.setattr(answers, "say_json", lambda record: log.append(str(len(record["prompt_ids"]))))
    monkeypatch.setattr(answers, "say", lambda text, end="\n": log.append(text.split(" ")[1].rpartition(":")[2]))
    short_first = prompts.with_name("short_first.jsonl")
    short_first.write_text("".join([(entries := prompts.read_text().splitlines(True))[1], entries[0], *entries[2:]]))
    run("generate", "--prompts", short_first, "--json", *BATCH)
    first, *others = [part for part in "".join(log).split(".") if part]
    assert (first, others) == ("1", ["16011"])  # the third and fourth wait for the second
    log.clear()
    run("generate", "--prompts", prompts, *BATCH)
    printed = "".join(log).strip(".")
    assert sorted(printed.replace(".", "")) == list("1234") and printed[0] == "2" and printed.count(".") > 2


def test_an_interrupt_that_python_drops_comes_again():
    class Finaliser:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted), raising_interrupts():
        finaliser = Finaliser()
        del finaliser
        gc.collect()
        for _ in range(100):
            time.sleep(0.1)


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with raising_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.signal(signal.SIGINT, signal.SIG_DFL) is signal.SIG_IGN


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"]])
def test_help_that_cannot_be_written(capsys, monkeypatch, arguments):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(arguments) == 1
        full.flush()  # nothing is left that the end of the program would fail to write
    assert capsys.readouterr().err == "kvjax: error: standard output: No space left on device\n"


def test_answers_that_cannot_be_written(tiny, capsys, monkeypatch):  # noqa: F811
    arguments = ["generate", "--prompt", "the cache", *map(str, SMALL)]
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(arguments) == 1
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(arguments) == 1
    assert capsys.readouterr().err.splitlines() == [
        "kvjax generate: error: standard output: No space left on device",
        "kvjax generate: error: standard output is closed",
    ]


def test_a_reader_that_has_left_is_no_error(tiny, capsys, monkeypatch):  # noqa: F811
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["generate", "--prompt", "the cache", *map(str, SMALL)]) == 141
    assert capsys.readouterr().err == ""


def test_an_ascii_stream_gets_escapes(tiny, monkeypatch, tmp_path):  # noqa: F811
    file = lines(tmp_path / "prompts.jsonl", {"prompt": "grüße, 世界"})
    monkeypatch.setattr(tiny.tokenizer, "decode", lambda ids: "é" * len(ids), raising=False)

    def bytes_of(*flags):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        assert cli.main(["generate", "--prompts", str(file), *map(str, SMALL), *flags]) == 0
        return sys.stdout.buffer.getvalue()

    assert bytes_of().endswith(b"\n" + 12 * rb"\xe9" + b"\n")
    record = json.loads(bytes_of("--json").decode("ascii"))
    assert (record["prompt"], record["text"]) == ("grüße, 世界", "é" * 12)


def test_a_terminal_gets_a_progress_bar(run, tiny, prompts, monkeypatch):  # noqa: F811
    monkeypatch.setattr(answers, "on_terminal", lambda: True)
    status, out, err = run("generate", "--prompts", prompts, "--json", *BATCH)
    assert status == 0 and len([json.loads(line) for line in out]) == 4 and "4/4" in err[-1]


TRAP = """
import os, signal, sys
class Trap:
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            os.kill(os.getpid(), {number})
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)
sys.meta_path.insert(0, Trap())
import kvjax_script
sys.exit(kvjax_script.main())
"""


@pytest.mark.parametrize("number, status", [(2, 130), (15, 143)])
def test_an_interrupt_while_jax_is_imported_is_one_line(number, status):
    done = subprocess.run([sys.executable, "-c", TRAP.format(number=number)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "kvjax: interrupted\n")


def test_the_package_is_a_program_and_knows_its_version():
    done = subprocess.run([sys.executable, "-m", "kvjax", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("kvjax ") and "jax" in done.stdout
