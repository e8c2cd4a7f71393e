"""What tests of real clients share that register code of their own."""

import pytest

from fedjax_mr.config import imports


@pytest.fixture
def registries(monkeypatch):
    """Forget afterwards what a test has registered."""
    before = {registry.kind: dict(registry) for registry in imports.REGISTRIES}
    monkeypatch.setattr(imports, "_IMPORTED", {})
    yield
    for registry in imports.REGISTRIES:
        registry.clear()
        dict.update(registry, before[registry.kind])
