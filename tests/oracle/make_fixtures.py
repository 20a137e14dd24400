"""Makes tests/fixtures with Hugging Face transformers: what kvjax's models must reproduce.

Runs in an environment of its own; nothing of kvjax is imported here:

    python3.11 -m venv oracle-env && oracle-env/bin/pip install torch==2.13.0 transformers accelerate gguf safetensors
    oracle-env/bin/python tests/oracle/make_fixtures.py tiny
    oracle-env/bin/python tests/oracle/make_fixtures.py rope
    oracle-env/bin/python tests/oracle/make_fixtures.py smollm2 PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf
    oracle-env/bin/python tests/oracle/make_fixtures.py beams PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf

Float32 on the CPU, one sequence at a time, eager attention.  Greedy decoding does not stop at the end token: 64 (or 48)
tokens each.  A margin is the highest logit less the second highest at that step.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from beam_cases import SMOLLM2_CASES, beam_search, tiny_cases
from configs import ROPE, TINY
from prompts import PASSAGE, PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, set_seed
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

FIXTURES = Path(__file__).parents[1] / "fixtures"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tiny", help="tiny random models, their greedy tokens and logits")
    commands.add_parser("rope", help="rotary frequencies of real models' configs")
    commands.add_parser("smollm2", help="greedy tokens and logits of SmolLM2").add_argument("gguf", type=Path)
    commands.add_parser("beams", help="beam searches of SmolLM2 and the tiny models").add_argument("gguf", type=Path)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    if arguments.command == "tiny":
        for name, config in TINY.items():
            make_tiny(name, config)
    elif arguments.command == "rope":
        make_rope()
    elif arguments.command == "smollm2":
        make_smollm2(arguments.gguf)
    else:
        make_beams(arguments.gguf)


def load_smollm2(path: Path) -> tuple[Any, Callable[[str], list[int]]]:
    """The model, and its encoder of text."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model, lambda text: tokenizer(text, add_special_tokens=False).input_ids


def make_beams(path: Path) -> None:
    """beams_tiny.json and beams_smollm2.json: sequences and scores of beam searches, one prompt at a time."""
    cases = []
    for name in TINY:
        model = AutoModelForCausalLM.from_pretrained(FIXTURES / name, attn_implementation="eager").eval()
        runs = json.loads((FIXTURES / name / "oracle.json").read_text())["prompts"]
        cases += [{"model": name, **beam_search(model, *case)} for case in tiny_cases(name, runs)]
    write_json(FIXTURES / "beams_tiny.json", cases, "cases")

    model, encode = load_smollm2(path)
    cases = []
    for texts, options in SMOLLM2_CASES:
        cases += [{"model": "smollm2", **beam_search(model, encode(text), options)} for text in texts]
        print(f"{len(cases)} searches of SmolLM2", flush=True)
    write_json(FIXTURES / "beams_smollm2.json", cases, "cases")


def make_smollm2(path: Path, steps: int = 64, passage_tokens: int = 512) -> None:
    """smollm2_greedy.json: greedy tokens of every prompt.  smollm2_logits.npz: logits along a passage, of some ids."""
    model, encode = load_smollm2(path)
    ids = encode(PASSAGE)[:passage_tokens]
    assert len(ids) == passage_tokens, len(ids)
    logits = model(torch.tensor([ids])).logits[0].numpy()
    chosen = np.sort(np.random.default_rng(0).choice(logits.shape[1], 64, replace=False))
    top = np.argsort(-logits, axis=1, kind="stable")[:, :8]
    np.savez_compressed(
        FIXTURES / "smollm2_logits.npz",
        ids=np.asarray(ids, np.int32),
        chosen_ids=chosen.astype(np.int32),
        chosen_logits=logits[:, chosen],
        top_ids=top.astype(np.int32),
        top_logits=np.take_along_axis(logits, top, 1),
        made=json.dumps(provenance()),
    )

    prompts = []
    for text in PROMPTS:
        prompts.append({"text": text, **greedy(model, encode(text), steps)[0]})
        print(f"{len(prompts)}/{len(PROMPTS)} {text!r}", flush=True)
    write_json(FIXTURES / "smollm2_greedy.json", prompts)


def make_rope() -> None:
    """rope.json: frequencies and magnitude of rotary embeddings at the sizes that real models have."""
    cases = []
    for name, fields in ROPE.items():
        config = LlamaConfig(**fields)
        rope = LlamaRotaryEmbedding(config)
        cases.append(
            {
                "name": name,
                "config": fields,
                "frequencies": rope.inv_freq.tolist(),
                "magnitude": float(rope.attention_scaling),
            }
        )
    write_json(FIXTURES / "rope.json", cases, "cases")


def make_tiny(name: str, config: Any, steps: int = 48) -> None:
    """A directory as `save_pretrained` writes it, and oracle.json and logits.npy beside."""
    set_seed(0)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):  # made as zeros, which would hide a bias that is not added
            parameter.normal_(std=0.35)
        if "norm" in parameter_name:  # made as ones
            parameter.uniform_(0.5, 1.5)
    directory = FIXTURES / name
    model.save_pretrained(directory)
    generator = np.random.default_rng(0)
    lengths = (3, 17, 31, 48)
    runs = [greedy(model, generator.integers(0, config.vocab_size, length).tolist(), steps) for length in lengths]
    write_json(directory / "oracle.json", [run for run, _ in runs])
    np.save(directory / "logits.npy", runs[-1][1])
    print(name, "smallest margins", [min(run["margins"]) for run, _ in runs], flush=True)


def greedy(model: Any, prompt: list[int], steps: int) -> tuple[dict[str, Any], np.ndarray]:
    """Greedy tokens with their margins, and the logits [prompt + steps − 1, vocabulary] that led to them."""
    output = model(torch.tensor([prompt]), use_cache=True)
    logits, tokens = [output.logits[0]], [int(output.logits[0, -1].argmax())]
    while len(tokens) < steps:
        output = model(torch.tensor([tokens[-1:]]), cache=output.cache, use_cache=True)
        logits.append(output.logits[0])
        tokens.append(int(output.logits[0, -1].argmax()))
    every = torch.cat(logits)
    best = every[len(prompt) - 1 :].topk(2).values
    margins = [round(float(margin), 5) for margin in best[:, 0] - best[:, 1]]
    return {"ids": prompt, "tokens": tokens, "margins": margins}, every.numpy()


def write_json(path: Path, items: list[dict[str, Any]], what: str = "prompts") -> None:
    """One item a line."""
    lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in items)
    path.write_text(f'{{"made": {json.dumps(provenance())},\n"{what}": [\n{lines}\n]}}\n', encoding="utf-8")


def provenance() -> dict[str, str]:
    """With what a fixture was made; the model file by its name alone, whatever folder it lay in."""
    arguments = [Path(argument).name for argument in sys.argv[1:]]
    return {
        "command": " ".join(["python tests/oracle/make_fixtures.py", *arguments]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": "float32",
    }


if __name__ == "__main__":
    main()
