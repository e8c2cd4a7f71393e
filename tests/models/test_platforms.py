"""JAX skips accelerators that are absent, and searches for all others."""

import sys

import jax
import pytest

from fedjax_mr.models import platforms


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install compilers by name, and reset the platform that the tests have chosen."""

    def install(*names):
        for name in names:
            package = tmp_path / "site" / name.replace(".", "/")
            package.mkdir(parents=True)
            (package / "__init__.py").touch()

    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(platforms.importlib.metadata, "entry_points", lambda group: [])
    for name in ("jax_plugins", "libtpu"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", None)
    yield install
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    ("compilers", "devices", "expected"),
    [
        (["jax_plugins.xla_cuda12", "libtpu"], ["null", "vfio/vfio"], "cpu"),
        (["jax_plugins.xla_cuda13"], [], "cpu"),
        (["jax_plugins.xla_cuda12"], ["nvidia0"], None),
        (["jax_plugins.xla_cuda12"], ["nvidiactl"], None),
        (["jax_plugins.xla_cuda12"], ["dxg"], None),
        (["libtpu"], ["vfio/0"], None),
        (["libtpu"], ["accel0"], None),
        (["jax_plugins.of_another_maker", "libtpu"], [], None),
        ([], [], None),
    ],
)
def test_the_cpu_is_chosen_if_no_accelerator_is_there(compilers, devices, expected, installed, tmp_path):
    installed(*compilers)
    for name in devices:
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    platforms.skip_absent_accelerators(tmp_path / "dev")
    assert jax.config.values["jax_platforms"] == expected


def test_the_users_platform_stays(installed, tmp_path):
    installed("libtpu")
    jax.config.update("jax_platforms", "tpu,cpu")
    platforms.skip_absent_accelerators(tmp_path)
    assert jax.config.values["jax_platforms"] == "tpu,cpu"
