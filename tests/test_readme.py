"""The README's example runs as it stands and prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_prints_what_the_readme_says():
    (code, printed) = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL).groups()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_every_public_name_is_documented():
    import kvjax

    undocumented = [name for name in kvjax.__all__ if not (getattr(kvjax, name).__doc__ or "").strip()]
    assert undocumented == [] and len(kvjax.__all__) <= 30


def test_importing_the_library_needs_no_extra():
    """kvjax below the engine needs jax, numpy and jaxtyping alone."""
    blocked = ("flax", "gguf", "safetensors", "tokenizers", "matplotlib", "tqdm", "absl", "chex", "jinja2")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import kvjax, pallas_kernels.hardware"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
