"""The `kvjax` program, as its users meet it: answers, one-line complaints, and nothing else lost."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from kvjax import cli
from kvjax.commands.compare import compare
from kvjax.commands.demo_report import verdict
from kvjax.engine import PageMap, Request, Result
from kvjax.models import LoadedModel
from tests.engine.conftest import compile_once  # noqa: F401  compiled steps are kept here too
from tests.engine.tiny_model import VOCABULARY, TinyModel, reference_tokens
from tests.margins import assert_equal_tokens, compare_tokens
from tests.models.decoding import FIXTURES

WORDS = ["the", "a", "of", "to", "in", "is", "it", "on", "we", "you", "are", "page", "row", "cache"]


class WordTokenizer:
    """A word is a token; unknown words are told apart by their letters alone."""

    def encode(self, text):
        return [self.word(word) for word in text.split()]

    def word(self, word):
        return WORDS.index(word) if word in WORDS else len(WORDS) + sum(word.encode()) % (VOCABULARY - len(WORDS))

    def decode(self, ids):
        return " ".join(WORDS[token] if token < len(WORDS) else f"w{token}" for token in ids)

    def encode_chat(self, messages):
        return self.encode(" ".join(f"[{message['role']}] {message['content']}" for message in messages) + " [answer]")


@pytest.fixture(scope="module")
def model():
    return TinyModel(max_context=320)


@pytest.fixture
def tiny(model, monkeypatch):
    """The program with the tiny model behind every --model."""
    loaded = LoadedModel(model, WordTokenizer(), "tiny", ())
    monkeypatch.setattr("kvjax.models.load", lambda name: loaded)
    return loaded


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the program; returns exit status, lines on stdout, lines on stderr."""

    def run(*arguments):
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            status = exit.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out.splitlines(), err.splitlines()

    return run


def lines(path, *entries):
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in entries))
    return path


BATCHING = ("--max-new-tokens", 12, "--max-seqs", 2, "--chunk", 8, "--burst", 4)
SMALL = (*BATCHING, "--num-pages", 8)


def test_json_lines_come_in_the_order_of_the_input(run, tiny, tmp_path):
    entries = [{"prompt": "the cache of a page"}, {"prompt_ids": [5, 9, 2]}, {"prompt": "it is"}]
    file = lines(tmp_path / "prompts.jsonl", entries[0], "", entries[1], entries[2])
    status, out, err = run("generate", "--prompts", file, "--json", *SMALL)
    assert (status, err) == (0, [])
    records = [json.loads(line) for line in out]
    assert all(list(record) == ["prompt", "prompt_ids", "token_ids", "text", "finish_reason"] for record in records)
    assert [record["prompt"] for record in records] == ["the cache of a page", None, "it is"]
    assert [record["prompt_ids"] for record in records] == [[0, 13, 2, 1, 11], [5, 9, 2], [6, 5]]
    comparisons = []
    for record in records:
        assert record["finish_reason"] == "length"
        assert record["text"] == WordTokenizer().decode(record["token_ids"])
        comparisons.append(compare_tokens(record["token_ids"], *reference_tokens(tiny.model, record["prompt_ids"], 12)))
    assert_equal_tokens(comparisons, "generate")


def test_a_prompt_streams_its_answer(run, tiny):
    status, out, err = run("generate", "--prompt", "the cache", *SMALL)
    assert (status, err) == (0, [])
    assert out == [WordTokenizer().decode(reference_tokens(tiny.model, [0, 13], 12)[0])]


def test_files_without_json_are_for_reading(run, tiny, tmp_path):
    file = lines(tmp_path / "prompts.jsonl", {"prompt": "the cache"}, {"prompt": "a row"})
    status, out, _ = run("generate", "--prompts", file, *SMALL)
    assert status == 0 and out[0] == f"--- {file}:1 (length)" and out[2] == f"--- {file}:2 (length)"


def test_chat_wraps_the_prompt(run, tiny):
    plain = json.loads(run("generate", "--prompt", "the cache", "--json", *SMALL)[1][0])
    chat = json.loads(run("generate", "--prompt", "the cache", "--json", "--chat", *SMALL)[1][0])
    assert chat["prompt"] == plain["prompt"] == "the cache"
    assert chat["prompt_ids"] == WordTokenizer().encode("[user] the cache [answer]")


def test_flags_of_the_cache_change_no_token_and_flags_of_sampling_do(run, tiny, tmp_path):
    file = lines(tmp_path / "prompts.jsonl", *({"prompt_ids": [one, 2 * one, 7]} for one in range(5)))

    def tokens(*flags):
        status, out, err = run("generate", "--prompts", file, "--json", "--temperature", 1, *BATCHING, *flags)
        assert (status, err) == (0, [])
        return [json.loads(line)["token_ids"] for line in out]

    roomy = ("--num-pages", 8)
    assert tokens(*roomy) == tokens("--cache", "contiguous") == tokens("--cache", "virtual")
    assert tokens(*roomy) == tokens(*roomy, "--cache", "extents")
    assert tokens(*roomy) == tokens("--num-pages", 4, "--page-size", 4)
    assert tokens(*roomy) != tokens(*roomy, "--seed", 1) and tokens(*roomy) != tokens(*roomy, "--top-k", 1)


def test_stop_strings(run, tiny):
    text = WordTokenizer().decode(reference_tokens(tiny.model, [0, 13], 12)[0])
    stop = " " + text.split()[4]
    record = json.loads(run("generate", "--prompt", "the cache", "--json", "--stop", stop, *SMALL)[1][0])
    assert record["finish_reason"] == "stop" and record["text"] == text[: text.index(stop)]


def test_a_bad_line_is_named_and_the_others_are_answered(run, tiny, tmp_path):
    bad = {
        "{not json": "is not JSON",
        "[1, 2]": "must be an object",
        "{}": 'either "prompt" or "prompt_ids"',
        '{"text": "the"}': "has the unknown key 'text'; known: prompt, prompt_ids",
        '{"prompt": "the", "max_tokens": 5}': "has the unknown key 'max_tokens'",
        '{"prompt": "the", "prompt": "a"}': "the key 'prompt' comes twice",
        '{"prompt": "the", "prompt_ids": [1]}': 'either "prompt" or "prompt_ids"',
        '{"prompt": ""}': "not empty",
        '{"prompt": 7}': "must be a text",
        '{"prompt_ids": []}': "at least one",
        '{"prompt_ids": [1, "2"]}': "list of token ids",
        '{"prompt_ids": [true]}': "list of token ids",
        '{"prompt_ids": [false]}': "list of token ids",
        '{"prompt": "\\ud83d"}': "no valid Unicode",
        "[" * 100_000: "is not JSON",
        '{"prompt_ids": [61]}': "the vocabulary is 0 … 60",
        '{"prompt": "   "}': "has no tokens",
        json.dumps({"prompt": "the " * 320}): "context of 320",
        json.dumps({"prompt": "the " * 200}): "does not fit the cache of 8 pages",
    }
    file = lines(tmp_path / "prompts.jsonl", {"prompt": "the cache"}, *bad, {"prompt": "it is"})
    status, out, err = run("generate", "--prompts", file, "--json", *SMALL)
    records = [json.loads(line) for line in out]
    assert status == 1 and len(records) == len(bad) + 2
    for number, (record, problem, complaint) in enumerate(zip(records[1:-1], bad.values(), err, strict=True), 2):
        assert (record["finish_reason"], record["token_ids"]) == ("error", [])
        assert problem in record["error"]
        assert complaint.startswith(f"kvjax generate: error: {file}:{number}: ") and problem in complaint
    for record in (records[0], records[-1]):
        expected = reference_tokens(tiny.model, record["prompt_ids"], 12)
        assert compare_tokens(record["token_ids"], *expected).equal


def test_a_line_that_is_not_utf8_is_named(run, tiny, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "the"}\n{"prompt": "\xff"}\n')
    status, out, err = run("generate", "--prompts", file, "--json", *SMALL)
    assert status == 1 and len(out) == 2 and err[0].startswith(f"kvjax generate: error: {file}:2: is not JSON")


def test_a_model_without_a_tokenizer_takes_ids(run, model, monkeypatch, tmp_path):
    monkeypatch.setattr("kvjax.models.load", lambda name: LoadedModel(model, None, "tiny", ()))
    file = lines(tmp_path / "prompts.jsonl", {"prompt_ids": [3, 1, 4]}, {"prompt": "the"})
    status, out, err = run("generate", "--prompts", file, "--json", *SMALL)
    good, bad = (json.loads(line) for line in out)
    assert status == 1 and err == [f'kvjax generate: error: {file}:2: tiny has no tokenizer; give "prompt_ids"']
    assert good["text"] is None and good["token_ids"] == reference_tokens(model, [3, 1, 4], 12)[0]
    assert bad["finish_reason"] == "error"
    assert run("generate", "--prompts", file, *SMALL)[1][1] == " ".join(map(str, good["token_ids"]))
    assert run("generate", "--prompts", file, "--stop", "x")[2] == [
        "kvjax generate: error: --stop needs a tokenizer, and this model has none"
    ]


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--num-pages", 0], "argument --num-pages: '0' is not a whole number from 1 to 2147483647"),
        (["--page-size", 0], "argument --page-size: '0' is not a whole number from 1 to 1048576"),
        (["--page-size", "many"], "argument --page-size: 'many' is not"),
        (["--max-seqs", 0], "argument --max-seqs"),
        (["--max-new-tokens", 0], "argument --max-new-tokens"),
        (["--temperature", -1], "argument --temperature: '-1' is not a number of at least 0"),
        (["--temperature", "nan"], "argument --temperature"),
        (["--top-p", 0], "argument --top-p: '0' is not a number above 0 and at most 1"),
        (["--num-pages", 2**31], "argument --num-pages: '2147483648' is not a whole number from 1 to 2147483647"),
        (["--page-size", 10**10], "from 1 to 1048576"),
        (["--max-seqs", 10**10], "from 1 to 65536"),
        (["--chunk", 10**10], "from 1 to 1048576"),
        (["--burst", 10**10], "argument --burst: '10000000000' is not a whole number from 1 to 65536"),
        (["--max-new-tokens", 10**10], "from 1 to 2147483647"),
        (["--top-k", 10**10], "from 0 to 2147483647"),
        (["--temperature", 1e300], "at most 1e+06"),
        (["--seed", 2**32], "argument --seed: '4294967296' is not a whole number from 0 to 4294967295"),
        (["--model", ""], "argument --model: the text is empty"),
        (["--two\nlines"], "unrecognized arguments: --two lines"),
        (["--stop", ""], "argument --stop: the text is empty"),
        (["--chat", "--raw"], "not allowed with"),
        (["--prompts", "x"], "not allowed with"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_bad_flag_is_named_in_one_line(run, flags, complaint):
    status, out, err = run("generate", "--prompt", "the", *flags)
    assert (status, out, len(err)) == (2, [], 1) and complaint in err[0]


def test_no_command_and_no_prompt_are_one_line_too(run):
    for arguments in ([], ["generate"], ["sing"]):
        status, _, err = run(*arguments)
        assert status == 2 and len(err) == 1


def test_files_that_cannot_be_read_are_named(run, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    for path, problem in (("missing.jsonl", "No such file"), ("empty.jsonl", "is empty"), (".", "Is a directory")):
        status, out, err = run("generate", "--prompts", tmp_path / path)
        assert (status, out, len(err)) == (1, [], 1)
        assert err[0].startswith(f"kvjax generate: error: --prompts {tmp_path / path}: ") and problem in err[0]


def test_models_that_cannot_be_loaded_are_named(run, tmp_path):
    (tmp_path / "short.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\x01")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    for name in ("nowhere", "short.gguf", "bare"):
        status, out, err = run("generate", "--model", tmp_path / name, "--prompt", "the")
        assert (status, out, len(err)) == (1, [], 1)
        assert err[0].startswith(f"kvjax generate: error: --model {tmp_path / name}")
    assert "num_attention_heads" in err[0]


def test_a_missing_package_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvjax.models.gguf", None)
    monkeypatch.delitem(sys.modules, "kvjax.models.smollm2", raising=False)
    status, _, err = run("generate", "--prompt", "the")
    assert (status, len(err)) == (1, 1) and "pip install 'kvjax[demo]'" in err[0]


def test_sizes_that_no_cache_can_have_are_one_line(run, tiny):
    status, out, err = run("generate", "--prompt", "the", "--num-pages", 2**31 - 1)
    assert (status, out, len(err)) == (1, [], 1) and "num_pages=2147483647" in err[0]
    status, out, err = run("generate", "--prompt", "the", "--num-pages", 4, "--cache", "contiguous")
    assert (status, out, len(err)) == (1, [], 1) and "--num-pages" in err[0]


def test_help_teaches(run):
    for arguments, words in {
        ("--help",): ["kvjax demo", "kvjax generate --prompt"],
        ("generate", "--help"): ["examples:", "--num-pages", "prompt_ids", "finish_reason"],
        ("demo", "--help"): ["examples:", "kvjax demo --num-pages"],
    }.items():
        status, out, _ = run(*arguments)
        assert status == 0 and all(word in "\n".join(out) for word in words)


def result(tokens, margins=None, reason="length"):
    return Result(0, Request((1,)), tuple(tokens), tuple(margins or [1.0] * len(tokens)), None, reason)


def test_runs_are_compared_up_to_the_first_narrow_margin():
    reference = [result([1, 2, 3]), result([4, 5, 6], [1, 1e-3, 1]), result([7, 8, 9]), result([1, 2])]
    runs = [result([1, 2, 3]), result([4, 0, 0]), result([7, 8], reason="cancelled"), result([1, 2])]
    good = compare(runs, reference)
    assert good.equal and (good.compared, good.excused) == (3 + 2 + 2 + 2, 1)
    wrong = compare([result([1, 0, 3]), runs[1], result([7, 8]), result([1, 2, 3])], reference)
    assert not wrong.equal
    assert [(one.request, one.step, one.margin) for one in wrong.divergences if not one.excused] == [
        (0, 1, 1.0),
        (2, 2, float("inf")),
        (3, 2, float("inf")),
    ]


def test_a_request_that_failed_is_no_difference_between_runs():
    reference = [result([1, 2, 3]), result([4, 5, 6]), result([7])]
    runs = [result([1, 2], reason="error"), result([4, 5, 6]), result([], reason="error")]
    comparison = compare(runs, reference)
    assert comparison.equal and (comparison.compared, comparison.failed) == (2 + 3, (0, 2))
    assert compare(reference, runs).failed == (0, 2)
    assert not compare([result([1, 9], reason="error"), *runs[1:]], reference).equal


def demo(run, tmp_path, *flags):
    status, out, err = run("demo", "--png", tmp_path / "a" / "map.png", "--json", tmp_path / "figures.json", *flags)
    return status, out, err, json.loads((tmp_path / "figures.json").read_text())


@pytest.mark.parametrize("cache", ["virtual", "extents"])
def test_the_demo_on_other_caches_gives_the_same_tokens(cache, run, tiny, tmp_path):
    status, out, _, report = demo(run, tmp_path, "--cache", cache)
    assert status == 0 and any(
        line.startswith("equal: ") and f"{cache} cache are those of the paged" in line for line in out
    )
    figures = report["runs"][cache]
    assert (figures["mean_runs"] is None) == (cache == "virtual") and report["runs"]["paged"]["mean_runs"] is None
    assert (tmp_path / "a" / "map.png").exists() == (cache == "extents")
    assert figures["finished"] == {"cancelled": 3, "length": 13}
    assert figures["preemptions"] > 0 and figures["copies_on_write"] > 0


def test_the_demo_shows_pages_at_work(run, tiny, tmp_path):
    status, out, err, report = demo(run, tmp_path)
    text = "\n".join(out)
    assert status == 0 and any(line.startswith("equal: ") for line in out)
    assert out[0].startswith("16 questions to smollm2") and "about a minute" in out[1]
    paged, contiguous = report["runs"]["paged"], report["runs"]["contiguous"]
    assert paged["finished"] == {"cancelled": 3, "length": 13} and contiguous["finished"] == {"length": 16}
    assert paged["preemptions"] > 0 and paged["copies_on_write"] > 0
    assert paged["peak_pages"] <= paged["num_pages"] and paged["fragmentation"] < contiguous["fragmentation"]
    assert report["comparison"]["equal"] and report["comparison"]["tokens_compared"] == paged["generated_tokens"]
    assert [answer["finish_reason"] for answer in report["answers"]].count("cancelled") == 3
    assert (tmp_path / "a" / "map.png").stat().st_size > 10_000
    for word in (
        "What is the capital of France?",
        "generated tokens/s",
        "preemptions",
        "copies on write",
        "(cancelled)",
    ):
        assert word in text
    assert any("16 of 16 done" in line for line in err)  # the progress bar


def test_a_demo_whose_caches_disagree_fails(run, tiny, tmp_path, monkeypatch):
    """All that is known has been said and written when the picture fails in its turn, of which nothing is left."""

    def draw(page_map, path, title):
        assert title == "Pages of tiny over time"
        path.write_text("half a picture")
        raise RuntimeError("no matplotlib")

    monkeypatch.setattr("kvjax.cache.copy_pages", lambda pool, *_: pool)
    monkeypatch.setattr(PageMap, "draw", draw)
    status, out, err, report = demo(run, tmp_path)
    assert status == 1 and out[-1].startswith("DIFFERENT: ") and not report["comparison"]["equal"]
    assert err[-1] == f"kvjax demo: error: {tmp_path / 'a' / 'map.png'}: no matplotlib"
    assert list((tmp_path / "a").iterdir()) == []


def test_a_demo_that_could_not_serve_everybody_is_incomplete_and_not_different():
    broken = replace(result([1, 2], reason="error"), id=2, error="the cache is\nfull")
    runs = {"paged": [result([1, 2, 3]), broken], "contiguous": [result([1, 2, 3]), result([1, 2, 3])]}
    said = verdict(compare(*runs.values()), runs)
    assert said.startswith("INCOMPLETE: 1 of 16 requests ended with an error; first request 2 of the paged cache: ")
    assert "the cache is full; as far as they went, all 5 tokens of the paged cache are those of the contig" in said
    wrong = {**runs, "contiguous": [result([1, 9, 3]), result([1, 2, 3])]}
    assert verdict(compare(*wrong.values()), wrong).startswith("DIFFERENT: ")


def test_a_demo_of_which_both_files_are_one_is_refused(run, tiny, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    status, _, err = run("demo", "--png", tmp_path / "file", "--json", tmp_path / "link")
    assert status == 1 and len(err) == 1 and "--png and --json are both" in err[0]


def test_a_demo_on_a_pool_that_cannot_hold_its_system_prompt_says_so(run, tiny, tmp_path):
    flags = ("--png", tmp_path / "map.png", "--json", tmp_path / "figures.json", "--num-pages", 2)
    status, _, err = run("demo", *flags)
    assert status == 1 and "does not fit the cache of 2 pages" in err[-1]
    assert err[-1].startswith("kvjax demo: error: --model smollm2: ")
    assert list(tmp_path.iterdir()) == []  # no empty files


def test_a_demo_that_cannot_write_says_where(run, tiny, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = run("demo", "--png", tmp_path / "file" / "map.png", "--json", tmp_path / "figures.json")
    assert status == 1 and len(err) == 1
    assert err[0].startswith(f"kvjax demo: error: {tmp_path / 'file' / 'map.png'}: ")


def test_the_built_in_model_end_to_end(tmp_path):
    """`python -m kvjax.cli` in a process of its own, against transformers' tokens."""
    runs = json.loads((FIXTURES / "smollm2_greedy.json").read_text())["prompts"][:3]
    file = lines(tmp_path / "prompts.jsonl", *({"prompt": one["text"]} for one in runs))
    command = [sys.executable, "-m", "kvjax.cli", "generate", "--prompts", file, "--max-new-tokens", "12", "--json"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["prompt_ids"] for record in records] == [one["ids"] for one in runs]
    comparisons = [
        compare_tokens(
            record["token_ids"], one["tokens"][: len(record["token_ids"])], one["margins"][: len(record["token_ids"])]
        )
        for record, one in zip(records, runs, strict=True)
    ]
    assert_equal_tokens(comparisons, "SmolLM2 through the command line")
    assert all(len(record["token_ids"]) == 12 or record["finish_reason"] == "stop" for record in records)
