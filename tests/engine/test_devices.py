"""The compilation cache saves time and never stands in the way; CPU cores that cannot be used are told."""

import warnings

import jax

from fedjax_mr.engine import devices


def test_entries_cut_short_are_removed_and_unwritable_ones_are_no_news(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "fedjax_mr" / "xla" / devices._machine()
    folder.mkdir(parents=True)
    for name in ("whole-cache", "whole-atime", "half-cache"):
        (folder / name).touch()
    settings = ("cache_dir", "cache_max_size")
    names = [f"jax_compilation_{each}" for each in settings] + ["jax_persistent_cache_min_compile_time_secs"]
    before = {name: jax.config.values[name] for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        devices._use_compilation_cache()
        assert sorted(path.name for path in folder.iterdir()) == ["whole-atime", "whole-cache"]
        warnings.warn("Error writing persistent compilation cache entry for 'f': OSError: full", stacklevel=1)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
