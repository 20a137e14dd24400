"""The README's examples run as they stand and print what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()


EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)


def test_there_is_no_example_without_its_output():
    assert len(EXAMPLES) == README.count("```python") == 4


@pytest.mark.parametrize(("code", "printed"), EXAMPLES, ids=("library", "engine", "files", "virtual"))
def test_an_example_prints_what_the_readme_says(code, printed, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_every_public_name_is_documented():
    import kvjax

    undocumented = [name for name in kvjax.__all__ if not (getattr(kvjax, name).__doc__ or "").strip()]
    assert undocumented == [] and len(kvjax.__all__) <= 31


def test_importing_the_library_needs_no_extra():
    """kvjax below the engine needs jax, numpy and jaxtyping alone."""
    blocked = ("flax", "gguf", "safetensors", "tokenizers", "matplotlib", "tqdm", "absl", "chex", "jinja2")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import kvjax, pallas_kernels.hardware"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
