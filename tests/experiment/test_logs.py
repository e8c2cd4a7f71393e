"""The metrics in TensorBoard, Weights & Biases and MLflow; the last two for real, where they are installed."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedjax_mr import main
from fedjax_mr.config import config as configuration
from fedjax_mr.config import imports, loggers
from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import logs, resolve
from fedjax_mr.experiment.folder import COLUMNS, RunFolder, read_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def row(round, **changes):
    return dict.fromkeys(COLUMNS, 0.5) | {"round": round, "accuracy": round / 100} | changes


def begun(config=None):
    """Return a new run folder with its configuration."""
    folder = RunFolder.open(Config(run_dir="a"))
    folder.begin(config or Config())
    return folder


# --- What may be asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (
            ["--log=tensorbord"],
            "unknown logger 'tensorbord'; did you mean 'tensorboard'? (known: mlflow, tensorboard, trackio, wandb)",
        ),
        (["--log=mlflow,"], "unknown logger ''"),
        (["--log=wandb"], "log='wandb' needs nothing_of_this_name: pip install 'fedjax-mr[wandb]'"),
        (["--log=mlflow,wandb"], "log='wandb' needs nothing_of_this_name"),
    ],
)
def test_refused_before_anything_is_read(monkeypatch, flags, part):
    monkeypatch.setattr(loggers.WeightsAndBiases, "needs", "nothing_of_this_name")
    monkeypatch.setattr(loggers.MLflow, "needs", "json")
    with pytest.raises(UserError) as caught:
        resolve.resolve(configuration.parse(flags))
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_tensorboard_has_a_flag_of_its_own():
    assert Config(tensorboard=True, log="wandb,tensorboard").logs == ["wandb", "tensorboard"]
    assert Config(tensorboard=True).logs == ["tensorboard"]
    without = configuration.digest(Config())
    assert configuration.digest(Config(log="mlflow")) == without  # a run may be resumed with another one


# --- Several logs, one of which fails --------------------------------------------------------------------------------


class Kept:
    """A log that remembers."""

    def __init__(self, run):
        self.id, self.rounds, self.ended = run.id or "new", [], None
        self.begun = (run.id, run.done)
        self.all.append(self)

    def write(self, row):
        self.rounds.append(row["round"])

    def close(self, state, summary):
        self.ended = (state, summary)


@pytest.fixture
def kept(monkeypatch):
    """Two logs, of which the second is called broken; return all that were opened."""
    opened = []
    kinds = {name: type(name, (Kept,), {"all": opened}) for name in ("kept", "broken")}
    monkeypatch.setattr(logs, "LOGGERS", kinds)
    return opened


def test_a_resumed_run_goes_on_in_the_same_log_and_a_new_log_gets_the_rows_so_far(kept):
    folder = begun()
    for names, rounds in (("kept", (5, 10)), ("kept,broken", (15,))):
        one = logs.Logs()
        one.open(names.split(","), {}, folder)
        for number in rounds:
            folder.append(row(number))
            one.write(folder.rows()[-1])
        one.close()
    assert [(log.begun, log.rounds) for log in kept] == [
        ((None, 0), [5, 10]),
        (("new", 10), [15]),
        ((None, 10), [5, 10, 15]),
    ]
    assert kept[0].ended == ("new", {})  # this folder has no checkpoint
    folder.write_summary({"accuracy_best": 0.5, "strategy": "fedmr", "loss_last": None})
    one = logs.Logs()
    one.open(["kept"], {}, folder)
    one.close()
    assert kept[-1].ended == ("finished", {"accuracy_best": 0.5})
    (folder.path / "logs.json").write_text("[")
    with pytest.raises(UserError, match=r"logs\.json is damaged"):
        logs.Logs().open(["kept"], {}, folder)


@pytest.mark.parametrize("when", ["write", "close"])
def test_one_that_fails_is_told_once_and_left(kept, monkeypatch, capsys, when):
    def fail(self, *arguments):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(logs.LOGGERS["broken"], when, fail)
    one = logs.Logs()
    one.open(["broken", "kept"], {}, begun())
    one.write(row(5))
    one.write(row(10))
    one.close()
    assert kept[1].rounds == [5, 10] and kept[1].ended
    told = "fedjax-mr: --log=broken has ended (no route to host); the run continues, with its metrics in a\n"
    assert capsys.readouterr().err == told


def test_one_that_cannot_begin(kept, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("No API key\nconfigured")

    monkeypatch.setitem(logs.LOGGERS, "broken", fail)
    one = logs.Logs()
    with pytest.raises(UserError, match=r"^--log=broken cannot begin: No API key configured$"):
        one.open(["kept", "broken"], {}, begun())
    one.close()
    assert kept[0].ended


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def events(folder):
    """Return the values of all event files in order, (name, round): value; a purge forgets those from its round on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = {}
    for path in sorted(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()  # records of: length (8 bytes), checksum (4), event, checksum (4)
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            if event.session_log.status == SessionLog.START:
                found = {key: value for key, value in found.items() if key[1] < event.step}
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            data = data[16 + length :]
    return found


def test_tensorboard_event_files():
    pytest.importorskip("tensorboardX")
    board = loggers.TensorBoard(loggers.LoggedRun(Path("a"), {}))
    board.write(row(5, loss=math.nan, extra=2))
    board.write(row(10))
    board.close("finished", {})
    found = events("a/tensorboard")
    assert found["accuracy", 5] == pytest.approx(0.05) and found["extra", 5] == 2.0
    assert ("loss", 5) not in found and found["loss", 10] == pytest.approx(0.5)
    assert not any(tag == "round" for tag, _ in found)


# --- trackio, and a user's own ----------------------------------------------------------------------------------------


class FakeTrackio:
    """What `loggers.Trackio` calls, with the names and arguments of trackio 0.43."""

    def __init__(self):
        self.calls = []

    def init(self, project, name=None, *, config=None, resume="never", embed=True):
        self.calls.append(("init", project, name, resume, embed, config))
        self.name = name
        return self

    def log(self, metrics, step=None):
        self.calls.append(("log", metrics["accuracy"], step, "round" in metrics))

    def finish(self):
        self.calls.append(("finish",))


def test_trackio_continues_the_run_of_its_name(monkeypatch):
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    folder = begun()
    for number in (5, 10):
        one = logs.Logs()
        one.open(["trackio"], {"lr": 0.1}, folder)
        folder.append(row(number))
        one.write(folder.rows()[-1])
        one.close()
    begin = lambda resume: ("init", "fedjax_mr", "a", resume, False, {"lr": 0.1})
    assert fake.calls == [
        begin("never"), ("log", 0.05, 5, False), ("finish",), begin("allow"), ("log", 0.1, 10, False), ("finish",)
    ]  # fmt: skip


OWN = """
import fedjax_mr as fmr

class Lines:
    def __init__(self, run):
        self.file = open(run.folder / "lines.txt", "a")
        self.file.write(f"{run.settings['strategy']} after {run.done} rounds\\n")

    def write(self, row):
        self.file.write(f"{row['round']} {row['accuracy'] > 0}\\n")

    def close(self, state, summary):
        self.file.write(f"{state} {sorted(summary)[0]}\\n")
        self.file.close()

fmr.LOGGERS["lines"] = Lines
"""


def test_a_logger_of_a_user(monkeypatch):
    monkeypatch.setattr(imports, "_IMPORTED", {})
    Path("my_logger.py").write_text(OWN)
    flags = [*FLAGS, "--import=my_logger.py", "--strategy=fedavg"]
    try:
        assert main.main([*flags, "--log=lines"]) == 0
        # A finished run can be written anew to another logger.
        assert Path("my_run/lines.txt").read_text().splitlines() == [
            "fedavg after 0 rounds", "2 True", "4 True", "6 True", "finished accuracy_best"
        ]  # fmt: skip
        assert json.loads(Path("my_run/logs.json").read_text()) == {"lines": "lines"}
    finally:
        dict.pop(loggers.LOGGERS, "lines", None)
    Path("wrong.py").write_text("import fedjax_mr as fmr\nfmr.LOGGERS['three'] = 3\n")
    with pytest.raises(UserError, match=r"fmr\.LOGGERS\['three'\] takes a function open\(run\)"):
        imports.load(["wrong.py"])


# --- For real --------------------------------------------------------------------------------------------------------

FLAGS = [
    "--model=logistic", "--clients=6", "--cohort=3", "--local_epochs=1", "--eval_every=2", "--rounds=6", "--devices=1",
    "--noprogress", "--run_dir=my_run",
]  # fmt: skip
STOP = """
import sys, os, fedjax_mr as fmr
from fedjax_mr.config import config
def on_row(row):
    if row["round"] == 4:
        {end}
fmr.run(config.parse(sys.argv[1:]), on_row=on_row)
"""


def python(*arguments, **environment):
    known = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=known, timeout=300)


def stopped_and_resumed(name, end="os._exit(9)", **environment):
    """Run up to round 4, where the process dies before its checkpoint; go on to the end."""
    needed = loggers.LOGGERS[name].needs
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed (the extra '{name}')")
    flags = [*FLAGS, f"--log={name}"]
    assert python("-c", STOP.format(end=end), *flags, **environment).returncode == 9
    done = python("-m", "fedjax_mr.main", *flags, "--resume", **environment)
    assert done.returncode == 0, done.stderr
    rows, ids = read_rows("my_run"), json.loads(Path("my_run/logs.json").read_text())
    assert [each["round"] for each in rows] == [2, 4, 6] and list(ids) == [name]
    return rows, ids[name]


def columns(rows):
    """Return the numbers of the rows, but for their times, by column and round."""
    return {
        (name, row["round"]): pytest.approx(row[name], rel=1e-6)
        for row in rows
        for name in set(row) - {"round", "seconds"}
    }


@pytest.mark.slow
def test_tensorboard_for_real():
    rows, _ = stopped_and_resumed("tensorboard")
    found = events("my_run/tensorboard")
    assert {key: value for key, value in found.items() if key[0] != "seconds"} == columns(rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
@pytest.mark.parametrize("store", ["file:store", "sqlite:///store.db"])
def test_mlflow_for_real(store):
    rows, id = stopped_and_resumed("mlflow", MLFLOW_TRACKING_URI=store, MLFLOW_ALLOW_FILE_STORE="true")
    script = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient()
(run,) = [run for each in client.search_experiments() for run in client.search_runs([each.experiment_id])]
histories = {name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
             for name in run.data.metrics}
experiment = client.get_experiment(run.info.experiment_id).name
print(json.dumps([run.info.run_id, run.info.run_name, run.info.status, experiment, run.data.params, histories]))
"""
    read = python("-c", script, MLFLOW_TRACKING_URI=store, MLFLOW_ALLOW_FILE_STORE="true")
    found, name, status, experiment, params, histories = json.loads(read.stdout)
    assert (found, name, status, experiment) == (id, "my_run", "FINISHED", "fedjax_mr")
    assert (params["strategy"], params["cohort"], params["fedmr_unit"], params["clip_norm"]) == (
        "fedmr",
        "3",
        "leaf",
        "none",
    )
    written = {(name, step): value for name, history in histories.items() for step, value in history}
    expected = columns(rows)
    assert {key: written[key] for key in expected} == expected
    steps = [step for step, _ in histories["accuracy"]]
    assert steps in ([2, 4, 2, 4, 6], [2, 4, 4, 6])  # the resumed process repeats, from a checkpoint of round 0 or 2
    assert len({(step, value) for step, value in histories["accuracy"]}) == 3  # with the same numbers
    assert histories["accuracy_best"] == [[0, max(row["accuracy"] for row in rows)]]


def wandb_records(path):
    """Yield the records of an offline run: LevelDB's log format, blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := 32_768 - position % 32_768) < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_for_real():
    """Stopped, not killed: a thread of it writes the rows, and loses the last ones if the process is killed."""
    rows, id = stopped_and_resumed("trackio", "sys.exit(9)", TRACKIO_DIR="store", HF_HUB_OFFLINE="1")
    script = """
import json, sys, trackio
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("fedjax_mr")
print(json.dumps([name, SQLiteStorage.get_logs("fedjax_mr", name)], default=str))
"""
    read = python("-c", script, TRACKIO_DIR="store", HF_HUB_OFFLINE="1")
    name, history = json.loads(read.stdout.splitlines()[-1])
    assert name == id == "my_run"
    written = {each["step"]: each["accuracy"] for each in history}
    assert written == {row["round"]: pytest.approx(row["accuracy"], rel=1e-6) for row in rows}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # its protocol buffers'
def test_wandb_for_real():
    """Stopped, not killed: its own process writes the file, and loses the last seconds if it is killed."""
    rows, id = stopped_and_resumed("wandb", "sys.exit(9)", WANDB_MODE="offline")
    files = sorted(Path("wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) == 2  # one of each process, which `wandb sync` joins because both have the same id
    written, ended = {}, []
    for path in files:
        for record in wandb_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                settings = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                assert (record.run.run_id, record.run.display_name, record.run.project) == (id, "my_run", "fedjax_mr")
                assert settings["strategy"] == "fedmr" and settings["cohort"] == 3
            elif kind == "history":
                items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
                written |= {(name, items["round"]): value for name, value in items.items()}
            elif kind == "exit":
                ended.append(record.exit.exit_code)
    expected = columns(rows)
    assert {key: written[key] for key in expected} == expected
    assert ended[-1] == 0
