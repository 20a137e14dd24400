"""Compiled steps are kept for the length of a test session: engines of the same shapes compile once."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

SETTINGS = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    changed = SETTINGS | {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled"))}
    before = {name: getattr(jax.config, name) for name in changed}
    for name, value in changed.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
