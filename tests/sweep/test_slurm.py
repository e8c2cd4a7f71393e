"""Sweeps on Slurm: with scripts in the place of its commands, and in the slow suite on a real cluster of one node."""

import contextlib
import importlib.util
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from fedjax_mr import sweep
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import Interrupted, UserError
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.folder import COLUMNS, read_rows, run_state, saved_round
from fedjax_mr.sweep import slurm
from fedjax_mr.sweep.__main__ import main
from fedjax_mr.sweep.process import log_of

TINY = ("--model=logistic", "--rounds=6", "--eval_every=2", "--local_epochs=1", "--noprogress")
ON_SLURM = (*TINY, "--launcher=slurm", "--sweep_dir=runs")


@pytest.fixture(scope="module")
def submitit():
    if importlib.util.find_spec("submitit") is None:  # importing it here would configure logging
        pytest.skip("submitit is not installed (pip install 'fedjax_mr[slurm]')")


# --- Without Slurm ---------------------------------------------------------------------------------------------------


def test_without_submitit_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(ON_SLURM) == 2
    assert capsys.readouterr().err == (
        "fedjax-mr: --launcher=slurm needs the package submitit: pip install 'fedjax_mr[slurm]'\n"
    )


def test_without_slurm_it_says_so(submitit, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main(ON_SLURM) == 2
    assert capsys.readouterr().err.startswith("fedjax-mr: --launcher=slurm needs Slurm's commands")
    assert not list(Path("runs").glob("*/config.json"))


@pytest.fixture
def commands(submitit, monkeypatch):
    """Scripts with the names of Slurm's commands, which log their arguments; each test writes what they print."""
    folder = Path("bin").resolve()
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "SECONDS_PER_LOOK", 0.01)

    def write(**scripts):
        for name, lines in scripts.items():
            (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{folder}/log\n{lines}\n')
            (folder / name).chmod(0o755)

    def logged(name):
        lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
        return [line.split() for line in lines if line.split()[0] == name]

    write(srun="", sbatch='cp "$1" bin/script; echo Submitted batch job 7', squeue="", scontrol="")
    write.logged = logged
    write.during_sleep = lambda function: monkeypatch.setattr(slurm.time, "sleep", function)
    return write


def directives():
    """The options that the newest script gives to sbatch, by name."""
    lines = [line.removeprefix("#SBATCH --") for line in Path("bin/script").read_text().splitlines()]
    return dict(line.partition("=")[::2] for line in lines if not line.startswith("#"))


def test_the_flags_become_options_of_an_array_job(commands):
    flags = ["--slurm_partition=gpu", "--slurm_time=4:00:00", "--slurm_gpus=2", "--slurm_cpus=8", "--slurm_memory=32"]
    flags += ["--slurm_option=account=abc", "--slurm_option=exclusive"]
    assert main([*ON_SLURM, *flags, "--nowait", "--seeds=0:3"]) == 0
    found = directives()
    expected = {
        "array": "0-2%3", "partition": "gpu", "time": "4:00:00", "gpus-per-node": "2", "cpus-per-task": "8",
        "mem": "32G", "account": "abc", "exclusive": "", "requeue": "", "signal": "USR2@120", "open-mode": "append",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert "--cpus-per-task=8" in Path("bin/script").read_text().splitlines()[-1]
    _, runs = sweep.plan([*ON_SLURM, "--seeds=0:3"])
    jobs = json.loads(Path("runs/slurm/jobs.json").read_text())
    assert jobs == {run.folder.name: f"7_{number}" for number, run in enumerate(runs)}


def test_what_is_omitted_is_left_to_the_cluster(commands):
    assert main([*ON_SLURM, "--nowait"]) == 0
    assert not {"array", "partition", "time", "gpus-per-node", "cpus-per-task", "mem"} & set(directives())


def test_the_same_command_does_not_submit_what_is_in_the_queue(commands, capsys):
    assert main([*ON_SLURM, "--nowait", "--seeds=0:2"]) == 0
    commands(squeue="echo 7_0 RUNNING; echo 7_1 PENDING; echo 5 FAILED", sbatch="echo Submitted batch job 8")
    assert main([*ON_SLURM, "--nowait", "--seeds=0:2"]) == 0
    assert len(commands.logged("sbatch")) == 1
    assert "2 runs in Slurm's queue already, in job 7" in capsys.readouterr().err
    assert main([*ON_SLURM, "--nowait", "--seeds=0:3"]) == 0  # one more
    commands(squeue="echo 7_0 COMPLETING; echo 7_1 CANCELLED; echo 8 PENDING")
    assert main([*ON_SLURM, "--nowait", "--seeds=0:3"]) == 0  # the one that was cancelled
    assert len(commands.logged("sbatch")) == 3
    _, runs = sweep.plan([*ON_SLURM, "--seeds=0:3"])
    jobs = json.loads(Path("runs/slurm/jobs.json").read_text())
    assert [jobs[run.folder.name] for run in runs] == ["7_0", "8", "8"]


def test_a_job_that_has_just_ended_does_not_stand_for_the_rounds_that_its_run_got_since(commands):
    assert main([*ON_SLURM, "--nowait"]) == 0
    commands(squeue="echo 7 COMPLETING")
    Path("runs/slurm/7_code.txt").write_text("0\n")
    assert main([*ON_SLURM, "--nowait"]) == 0
    assert len(commands.logged("sbatch")) == 2


def test_the_exit_code_and_the_last_words_of_a_run_come_back(commands, capsys):
    assert main([*ON_SLURM, "--nowait"]) == 0
    commands(squeue="echo 7 RUNNING")
    _, (run,) = sweep.plan(ON_SLURM)
    log_of(run).write_text("fedjax-mr: no file absent.npz\n")

    def end(seconds):
        Path("runs/slurm/7_code.txt").write_text("2\n")

    commands.during_sleep(end)
    assert main(ON_SLURM) == 2
    assert f"{run.folder}: no file absent.npz (exit code 2; runs/slurm/7_0_log.out)" in capsys.readouterr().err


@pytest.mark.slow
def test_sweeps_that_start_at_once_submit_a_run_once(commands):
    """The first one is in sbatch while the second one starts; then the second one finds the job."""
    commands(
        squeue="if test -e bin/submitted; then echo 7 PENDING; fi", sbatch="sleep 2; touch bin/submitted; echo job 7"
    )
    command = [sys.executable, "-m", "fedjax_mr.sweep", *ON_SLURM, "--nowait"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = "".join(process.communicate(timeout=120)[1] for process in both)
    assert [process.returncode for process in both] == [0, 0], said
    assert len(commands.logged("sbatch")) == 1
    assert "1 run submitted" in said and "1 run in Slurm's queue already" in said


def test_runs_in_one_program_are_one_job(commands):
    assert main([*ON_SLURM, "--nowait", "--seeds=0:3", "--batch", "--strategies=fedavg,fedmr"]) == 0
    assert directives()["array"] == "0-1%2"
    assert sorted(json.loads(Path("runs/slurm/jobs.json").read_text()).values()) == ["7_0"] * 3 + ["7_1"] * 3


def test_a_job_that_leaves_the_queue_without_a_result_has_aborted(commands, capsys):
    commands(squeue="echo 7 CANCELLED")
    assert main(ON_SLURM) == 1
    shown = capsys.readouterr().err
    assert "job 7 has ended early (CANCELLED); 0 of 6 rounds are saved, the same command continues" in shown


@pytest.mark.parametrize(
    ("scripts", "said"),
    [
        ({"sbatch": "echo 'sbatch: error: invalid partition specified: no' >&2; exit 1"}, "rejects the jobs: invalid"),
        ({"sbatch": "echo no number"}, "sbatch gave no number of a job (Could not make sense"),
        (
            {"squeue": "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1"},
            "Slurm does not answer: slurm_load",
        ),
    ],
)
def test_what_slurm_says_is_one_line(scripts, said, commands, capsys):
    commands(**scripts)
    assert main(ON_SLURM) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1


def test_ctrl_c_leaves_the_jobs_alone(commands, capsys):
    commands(squeue="echo 7 PENDING")

    def press(seconds):
        raise KeyboardInterrupt

    commands.during_sleep(press)
    assert main(ON_SLURM) == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith("and scancel 7 cancels them")


@pytest.mark.parametrize(("saved", "requeued"), [(2, [["scontrol", "requeue", "12"]]), (0, [])])
def test_a_job_near_its_time_limit_returns_to_the_queue_if_it_made_progress(saved, requeued, commands, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    _, (run,) = sweep.plan(ON_SLURM)

    def train(runs, **options):
        assert not options["batch"]
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGUSR2)
        if saved:
            run.folder.mkdir(parents=True)
            Checkpoints(run.folder / "checkpoints").save(saved, {"w": np.ones(2)}, {})
        raise Interrupted("stopped", 143)

    monkeypatch.setattr(slurm, "run_all", train)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGUSR2)}
    try:
        with pytest.raises(SystemExit) as ended:
            slurm.train_in_job([(configuration.to_flags(run.config), str(run.folder))], "runs/slurm")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.value.code == 143
    assert commands.logged("scontrol") == requeued


@pytest.mark.parametrize(("array", "job"), [({}, "12"), ({"ARRAY_JOB_ID": "11", "ARRAY_TASK_ID": "4"}, "11_4")])
def test_a_job_writes_its_exit_code_as_text_under_the_id_that_squeue_shows(array, job, monkeypatch):
    for name, value in ({"JOB_ID": "12"} | array).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(slurm, "_train_in_job", lambda described: 3)
    Path("slurm").mkdir()
    assert slurm.train_in_job([], "slurm") == 3
    assert [path.name for path in Path("slurm").iterdir()] == [f"{job}_code.txt"]
    assert slurm._result(job, Path("slurm")) == 3


# --- A folder from another person ------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it creates a file."""

    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


@pytest.fixture
def foreign(commands):
    """A sweep folder with a run that another person has submitted as job 7, which this user's Slurm knows, too."""
    assert main([*ON_SLURM, "--nowait"]) == 0
    commands(squeue="echo 7 RUNNING; echo; echo 8", sbatch="echo Submitted batch job 9")
    return Path("runs/slurm")


def test_nothing_in_a_foreign_folder_is_unpickled(foreign, commands):
    bomb = pickle.dumps(Bomb())
    for name in ("7_0_result.pkl", "9_0_result.pkl", "9_submitted.pkl", "11_3_submitted.pkl"):
        (foreign / name).write_bytes(bomb)
    assert slurm._result("7", foreign) is None and slurm._result("9", foreign) is None
    assert main([*ON_SLURM, "--nowait", "--seeds=0:2"]) == 0
    assert not Path("executed").exists()
    assert (foreign / "7_0_result.pkl").exists()  # of a job that Slurm knows
    # A job that starts at once would execute a submission that has its number before submitit writes the real one.
    left = [path for path in foreign.glob("*.pkl") if path.read_bytes() == bomb]
    assert [path.name for path in left] == ["7_0_result.pkl"]


def test_a_result_older_than_the_submission_does_not_count(foreign, commands):
    (foreign / "9_code.txt").write_text("0\n")
    assert main([*ON_SLURM, "--nowait", "--seeds=0:2"]) == 0
    assert slurm._result("9", foreign) is None


@pytest.mark.parametrize("content", ["", "x\n", "-1\n", "1234\n", "0\n0\n", b"\xff\n", None], ids=repr)
def test_an_exit_code_of_another_form_is_one_line(content, tmp_path):
    path = tmp_path / "7_code.txt"
    if content is None:
        (tmp_path / "elsewhere").write_text("0\n")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"7_code\.txt holds no exit code"):
        slurm._result("7", tmp_path)


@pytest.mark.parametrize(
    "jobs", ["[1, 2]", '{"run": "../7"}', '{"run": 7}', '{"run": "7_0_result.pkl"}', "null", "[" * 100_000], ids=len
)
def test_jobs_of_another_form_are_one_line(jobs, tmp_path):
    (tmp_path / "jobs.json").write_text(jobs)
    with pytest.raises(UserError, match=r"jobs.json is damaged \(.*\): remove the file"):
        slurm._read_jobs(tmp_path)


@pytest.mark.parametrize("name", ["9_0_log.out", "jobs.json", "."])
def test_links_in_the_folder_of_the_jobs_are_refused(name, foreign, capsys):
    path = foreign / name
    if path.exists():
        path.rename("elsewhere")
    path = Path(os.path.normpath(path))
    path.symlink_to(Path("elsewhere").absolute())
    capsys.readouterr()
    assert main([*ON_SLURM, "--nowait", "--seeds=0:2"]) == 2
    shown = capsys.readouterr().err
    assert "is a symbolic link" in shown and shown.count("\n") == 1
    assert len(list(Path("bin").glob("log"))) == 1


# --- With a real Slurm -----------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).with_name("slurm.sh")


@pytest.fixture(scope="module")
def cluster(submitit):
    """A Slurm cluster of one node on this machine."""
    for program in ("slurmctld", "slurmd", "munged"):
        if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin"):
            pytest.skip(f"{program} is not installed (apt-get install slurmctld slurmd munge)")
    with tempfile.TemporaryDirectory() as folder:  # short, because the path of a socket must be
        subprocess.run([SCRIPT, "start", folder], check=True, timeout=60)
        os.environ["SLURM_CONF"] = f"{folder}/slurm.conf"
        try:
            yield
        finally:
            subprocess.run([SCRIPT, "stop", folder], check=True, timeout=120)
            del os.environ["SLURM_CONF"]


@pytest.fixture
def quick_looks(monkeypatch):
    monkeypatch.setattr(slurm, "SECONDS_PER_LOOK", 1.0)


def numbers(folder):
    columns = [name for name in COLUMNS if name != "seconds"]
    return [[row[name] for name in columns] for row in read_rows(folder)]


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def jobs_of(runs):
    known = json.loads(Path("runs/slurm/jobs.json").read_text())
    return [known[run.folder.name] for run in runs]


@pytest.mark.slow
def test_the_table_is_that_of_one_machine_and_nothing_is_trained_twice(cluster, quick_looks, capsys):
    product = ("--strategies=fedavg,fedmr", "--seeds=0:2", "--slurm_cpus=2", "--slurm_time=10")
    assert main([*ON_SLURM, *product]) == 0
    table = capsys.readouterr().out
    _, runs = sweep.plan([*ON_SLURM, *product])
    stamps = [(run.folder / "summary.json").stat().st_mtime_ns for run in runs]
    assert main([*ON_SLURM, *product]) == 0
    assert capsys.readouterr().out == table
    assert [(run.folder / "summary.json").stat().st_mtime_ns for run in runs] == stamps
    assert len(set(jobs_of(runs))) == 4 and len({job.partition("_")[0] for job in jobs_of(runs)}) == 1

    assert main([*TINY, *product, "--sweep_dir=here"]) == 0
    assert capsys.readouterr().out == table
    _, here = sweep.plan([*TINY, *product, "--sweep_dir=here"])
    assert [numbers(run.folder) for run in here] == [numbers(run.folder) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["scontrol requeue", "scancel --signal=USR2"], ids=["requeued", "near its limit"])
def test_a_job_that_is_stopped_resumes_and_ends_with_the_same_numbers(stop, cluster, quick_looks, capsys):
    rounds = ("--rounds=2000", "--eval_every=100")
    assert main([*ON_SLURM, *rounds, "--nowait", "--slurm_time=10"]) == 0
    _, (run,) = sweep.plan([*ON_SLURM, *rounds])
    wait_for(lambda: (saved_round(run.folder) or 0) >= 200)
    (job,) = jobs_of([run])
    subprocess.run([*stop.split(), job], check=True)
    assert run_state(run.folder) == "started"
    assert main([*ON_SLURM, *rounds]) == 0  # shows the same job
    assert "1 run in Slurm's queue already" in capsys.readouterr().err
    log = Path(f"runs/slurm/{job}_0_log.out").read_text()
    assert "DUE TO JOB REQUEUE" in log
    starts = [int(line.rpartition(" ")[2]) for line in log.splitlines() if "starts after round" in line]
    assert starts[0] == 0 and 200 <= starts[1] < 2000 and f"stopped after round {starts[1]}, saved" in log
    assert main([*TINY, *rounds, "--sweep_dir=here"]) == 0
    _, (here,) = sweep.plan([*TINY, *rounds, "--sweep_dir=here"])
    assert numbers(run.folder) == numbers(here.folder)


@pytest.mark.slow
def test_a_job_that_is_cancelled_is_saved_and_continues_with_the_same_command(cluster, quick_looks, capsys):
    rounds = ("--rounds=2000", "--eval_every=100")
    command = [sys.executable, "-m", "fedjax_mr.sweep", *ON_SLURM, *rounds]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        _, (run,) = sweep.plan([*ON_SLURM, *rounds])
        wait_for(lambda: (saved_round(run.folder) or 0) >= 200)
        (job,) = jobs_of([run])
        subprocess.run(["scancel", job], check=True)
        _, said = watching.communicate(timeout=120)
    assert watching.returncode == 1
    assert f"job {job} has ended early (CANCELLED)" in said and "the same command continues" in said
    assert (saved_round(run.folder) or 0) >= 200
    assert main([*ON_SLURM, *rounds]) == 0
    assert jobs_of([run]) != [job]


@pytest.mark.slow
def test_bad_input_of_a_run_and_of_slurm(cluster, quick_looks, capsys):
    assert main([*ON_SLURM, "--dataset=absent.npz"]) == 2
    assert "absent.npz" in capsys.readouterr().err
    assert main([*ON_SLURM, "--slurm_partition=absent"]) == 2
    assert capsys.readouterr().err.startswith("fedjax-mr: Slurm rejects the jobs: ")
