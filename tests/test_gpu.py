"""The script for the day a GPU is there: its driver, its comparisons, and all of it on the CPU with tiny sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gpu
import gpu_parts

SCRIPT = Path(gpu.__file__).with_suffix(".sh")

# A stand-in for gpu_parts.py whose parts end in every way; "child" leaves a process behind.
PARTS = """
import json, subprocess, sys, time
part, rows = sys.argv[1], sys.argv[2].removeprefix("--rows=")
def emit(**row):
    with open(rows, "a") as file:
        file.write(json.dumps(row) + "\\n")
emit(part=part, flags=sys.argv[3:])
if part == "correctness":
    print("the reason")
    sys.exit(1)
if part == "race":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    emit(child=child.pid)
    with open(rows, "a") as file:
        file.write('{"half')
    time.sleep(600)
if part == "nothing":
    sys.exit(2)
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    (tmp_path / "gpu_parts.py").write_text(PARTS)
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    return tmp_path / "out"


def recorded(out):
    return json.loads((out / "gpu.json").read_text())


def test_a_part_that_dies_or_takes_too_long_loses_only_itself(parts, monkeypatch, capsys):
    monkeypatch.setitem(gpu.PARTS, "race", gpu.PARTS["race"]._replace(seconds=1.5))
    monkeypatch.setattr(gpu, "LEAST", 0)
    assert gpu.main([f"--out={parts}", "--only=facts,correctness,race,graphs"]) == 1
    found = recorded(parts)
    assert {name: part["ended"] for name, part in found.items()} == {
        "facts": "finished",
        "correctness": "failed",
        "race": "stopped",
        "graphs": "finished",
    }
    assert found["correctness"]["rows"] == [{"part": "correctness", "flags": []}]
    assert found["correctness"]["error"] == "the reason"
    assert [list(row) for row in found["race"]["rows"]] == [["part", "flags"], ["child"]]
    assert not running(found["race"]["rows"][1]["child"])
    assert "2 of 4 parts finished" in capsys.readouterr().out
    assert "the reason" in (parts / "gpu.log").read_text() and "== graphs:" in (parts / "gpu.txt").read_text()


def test_the_same_call_again_runs_what_has_not_finished(parts, capsys):
    gpu.main([f"--out={parts}", "--only=facts,correctness"])
    before = recorded(parts)
    (parts / "gpu.log").unlink()
    assert gpu.main([f"--out={parts}", "--only=facts,correctness,graphs"]) == 1
    assert recorded(parts)["facts"] == before["facts"] and recorded(parts)["graphs"]["ended"] == "finished"
    assert "==== correctness" in (parts / "gpu.log").read_text() and "==== facts" not in (parts / "gpu.log").read_text()
    assert "finished before" in capsys.readouterr().out
    gpu.main([f"--out={parts}", "--only=facts", "--dry_run"])  # what a dry run has finished says nothing of a GPU
    assert recorded(parts)["facts"]["rows"] == [{"part": "facts", "flags": ["--dry_run"]}]


def running(process):
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().split()[2] != "Z"


def test_when_no_time_is_left_the_remaining_parts_are_not_started(parts):
    assert gpu.main([f"--out={parts}", "--only=facts,graphs", "--minutes=0.01"]) == 1
    assert {part["ended"] for part in recorded(parts).values()} == {"not started"}


def test_without_a_gpu_nothing_else_is_tried(parts, monkeypatch):
    monkeypatch.setitem(gpu.PARTS, "facts", gpu.PARTS["facts"]._replace(run="nothing"))
    assert gpu.main([f"--out={parts}", "--only=facts,graphs"]) == 2
    assert list(recorded(parts)) == ["facts"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--only=facts,mri", "unknown part mri"), ("--minutes=0", "above 0"), ("--wheels=.", "has no wheels")],
)
def test_bad_flags_are_one_line(flag, message, parts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        gpu.main([flag, f"--out={parts}"])
    assert ended.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_every_part_has_a_function():
    assert {part.run for part in gpu.PARTS.values()} == set(gpu_parts.PARTS)
    assert sum(part.seconds for name, part in gpu.PARTS.items() if name in ("facts", "correctness")) < 9 * 60


def test_the_program_compiled_ahead_is_known_for_every_network():
    for name in ("lenet5", "cnn_mcmahan", "resnet20", "vgg16"):
        (row,) = gpu_parts.compiled_ahead(name)
        assert row["kernels"] > 20 and row["launches"] < row["kernels"] and row["roofline_ms"] > 0


def test_the_longest_kernels_of_a_trace_are_those_of_the_gpu():
    name = lambda kind, pid, tid, name: {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
    kernel = lambda pid, tid, name, dur: {"ph": "X", "pid": pid, "tid": tid, "name": name, "dur": dur}
    events = [
        name("process_name", 1, 0, "/device:GPU:0"),
        name("process_name", 2, 0, "/host:CPU"),
        name("thread_name", 1, 7, "Stream #7(Compute)"),
        name("thread_name", 1, 8, "XLA Modules"),
        name("thread_name", 2, 7, "Stream of lines"),
        kernel(1, 7, "gemm", 3.0), kernel(1, 7, "add", 4.0), kernel(1, 7, "gemm", 2.0),
        kernel(1, 8, "jit_round", 99.0), kernel(2, 7, "python", 99.0),
        {"ph": "X", "pid": 3, "tid": 7, "name": "elsewhere", "dur": 9.0}, {"ph": "C", "name": "counter"},
    ]  # fmt: skip
    assert list(gpu_parts.longest_kernels(events)) == [("gemm", (2, 5.0)), ("add", (1, 4.0))]


@pytest.mark.parametrize("loss, accuracy, fine", [(2.0, 0.5, [True, True]), (2.1, 0.5, [False, True])])
def test_differences_from_the_cpu(loss, accuracy, fine):
    cpu = [{"loss": 2.0, "accuracy": 0.5}] * 12
    here = [{"loss": loss, "accuracy": accuracy}] * 12
    assert [row["fine"] for row in gpu_parts.differences("float32", here, cpu)] == fine
    broken = [{"loss": float("nan"), "accuracy": 0.0}] * 12
    assert [row["fine"] for row in gpu_parts.differences("TF32", broken, cpu)] == [False, False]


@pytest.mark.parametrize("name", ["lenet5", "resnet20"])
def test_torch_clients_side_by_side_train_as_one_after_the_other(name):
    """Two steps of two clients; with BatchNorm, which uses the statistics of the batch in training."""
    torch = pytest.importorskip("torch")
    import torch_networks
    import torch_vmap
    from benchmark import LR, MOMENTUM

    torch.manual_seed(0)
    network = torch_networks.ResNet20(width=4) if name == "resnet20" else torch_networks.build(name)
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(2, 2, 4, 3, 32, 32)).astype(np.float32))  # [step, K, B, ...]
    y = torch.from_numpy(rng.integers(0, 10, (2, 2, 4)))
    start = {key: value.clone() for key, value in network.state_dict().items()}
    alone = []
    for client in range(2):
        network.load_state_dict(start)
        network.train()
        optimizer = torch.optim.SGD(network.parameters(), lr=LR, momentum=MOMENTUM)
        for step in range(2):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x[step, client]), y[step, client]).backward()
            optimizer.step()
        alone.append({key: value.detach().clone() for key, value in network.named_parameters()})
    network.load_state_dict(start)
    params = torch_vmap.stacked(network, 2)
    velocity = {key: torch.zeros_like(value) for key, value in params.items()}
    update = torch_vmap.local_step(network)
    for step in range(2):
        update(params, velocity, x[step], y[step])
    for key, value in params.items():
        expected = torch.stack([each[key] for each in alone])
        torch.testing.assert_close(value, expected, rtol=2e-3, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.slow
def test_everything_on_the_cpu(tmp_path):
    pytest.importorskip("torch")
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run([SCRIPT, "--dry_run", f"--out={tmp_path}"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = recorded(tmp_path)
    assert list(found) == list(gpu.PARTS)
    assert {part["ended"] for part in found.values()} == {"finished"}
    engines = [row["engine"] for row in found["lenet5"]["rows"] if "engine" in row]
    assert engines == ["ours", "torch_loop", "torch_best", "torch_vmap"]
    steps = [row["local_step"] for row in found["vgg16"]["rows"] if "local_step" in row]
    assert steps == ["compiled ahead, h100", "here"]
    assert [row["seeds"] for row in found["together"]["rows"]] == [1, 2]
