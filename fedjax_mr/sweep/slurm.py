"""Runs of a sweep as jobs of a Slurm cluster, submitted through submitit as one array job.

Two programs use this file. Where the sweep was started, the `launcher` submits one job for each run that has neither
ended nor a job in Slurm's queue, and then watches the run folders, which all nodes share. In each job, `train_in_job`
trains the run as a sweep on one machine does.

The jobs do not need the program that submitted them. Before Slurm stops a job (scontrol requeue, preemption, scancel),
it sends SIGTERM, and the run saves its round. Before the time limit, it sends SIGUSR2. Then the run saves its round,
and the job returns to the queue. A job that starts again resumes its run. Submitit's own handler of these signals is
not used, because it would end the run in the middle of a round.
"""

import contextlib
import functools
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr import files, untrusted
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import Interrupted, TakenError, UserError
from fedjax_mr.experiment.folder import saved_round
from fedjax_mr.results.locks import lock_file
from fedjax_mr.sweep.bar import Bar
from fedjax_mr.sweep.plan import PlannedRun, Training
from fedjax_mr.sweep.runs import Launcher, code_if_ended, code_of, run_all, why

FOLDER = "slurm"  # in --sweep_dir: submitit's files, the logs of the jobs, and JOBS
JOBS = "jobs.json"  # the newest job of each run, by the name of its folder
SECONDS_PER_LOOK = 10.0  # between two calls of squeue
SECONDS_BEFORE_LIMIT = 120  # that a run has to save its round; Slurm may send the signal up to 60 seconds earlier
SECONDS_TO_WAIT = 60.0  # for another sweep that is submitting jobs
MOST_JOBS = 1000  # in one array; Slurm's MaxArraySize is 1001 unless a cluster changes it
LIVE = ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING")
LIVE += ("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
"""States in which a job runs, or will run, or is about to return to the queue."""

JOB = re.compile(r"\d{1,18}(_\d{1,9})?", re.ASCII)  # the id of a job, such as 12_3
CODE = re.compile(r"\d{1,3}\n", re.ASCII)  # the content of the file with a job's exit code
NUMBERED = re.compile(rf"({JOB.pattern})(_submitted\.pkl|_0_result\.pkl|_code\.txt)", re.ASCII)
"""The files of a job that `_remove_files_of_others` removes; its id is the first group."""

Jobs = dict[str, list[PlannedRun]]  # the runs of each job by its id


def launcher(training: Training, folder: Path | str, *, wait: bool = True) -> Launcher:
    """The launcher of ``--launcher=slurm``. Ctrl-C ends it, but not the jobs.

    Args:
      training: the settings of the jobs.
      folder: the folder that holds the run folders.
      wait: whether it returns after all jobs. Otherwise it returns the exit codes of those runs only that had ended
        before.

    Raises:
      UserError: Slurm or submitit is missing. The launcher raises it if Slurm rejects the jobs.
    """
    folder = Path(folder) / FOLDER
    return functools.partial(_launch, _executor(training, folder), folder, wait)


def _launch(
    executor: Any, folder: Path, wait: bool, batches: Sequence[Sequence[PlannedRun]], bar: Bar
) -> dict[Path, int]:
    codes: dict[Path, int] = {}
    unfinished: list[list[PlannedRun]] = []
    for batch in batches:
        ended = {run.folder: code for run in batch if (code := code_if_ended(run, bar)) is not None}
        codes |= ended
        unfinished.append([run for run in batch if run.folder not in ended])
        for run in batch:
            if run.folder in ended:
                bar.leave(run)
    if any(unfinished):
        jobs = _submit_once(executor, folder, unfinished, bar)
        if wait:
            codes |= _watch(jobs, folder, bar)
    return codes


# --- Submitting ------------------------------------------------------------------------------------------------------


def _submit_once(executor: Any, folder: Path, batches: Sequence[Sequence[PlannedRun]], bar: Bar) -> Jobs:
    """Submit the runs that have no job in the queue, and return the jobs of all."""
    in_queue: Jobs = {}
    with _locked(folder):
        known, states = _read_jobs(folder), _states()
        _remove_files_of_others(folder, states)
        new: list[list[PlannedRun]] = []
        for batch in batches:
            rest = []
            for run in batch:
                job = known.get(run.folder.name)
                # A job with a result is about to leave the queue, and its run may have got more rounds since.
                if job is not None and states.get(job) in LIVE and _result(job, folder) is None:
                    in_queue.setdefault(job, []).append(run)
                else:
                    rest.append(run)
            if rest:
                new.append(rest)
        if in_queue:
            bar.say(f"{_count(in_queue)} in Slurm's queue already, in job {_arrays(in_queue)}")
        submitted: Jobs = {}
        for start in range(0, len(new), MOST_JOBS):
            part = new[start : start + MOST_JOBS]
            submitted |= zip(_submit(executor, part), part, strict=True)
            known |= {run.folder.name: job for job, runs in submitted.items() for run in runs}
            with files.atomic_write(folder / JOBS) as path:
                path.write_text(json.dumps(known, indent=0), encoding="utf-8")
        if submitted:
            bar.say(f"{_count(submitted)} submitted to Slurm as job {_arrays(submitted)}; logs in {folder}")
    return in_queue | submitted


def _executor(training: Training, folder: Path) -> Any:
    """Submitit's executor with the parameters of the jobs."""
    try:
        executor = _submitit().SlurmExecutor(folder=folder)
    except RuntimeError:
        raise _no_slurm() from None
    options = {name: value or True for name, _, value in (each.partition("=") for each in training.slurm_option)}
    parameters: dict[str, Any] = {
        "job_name": "fedjax_mr",
        "partition": training.slurm_partition,
        "time": training.slurm_time,  # submitit's own default is 5 minutes
        "gpus_per_node": training.slurm_gpus,
        "cpus_per_task": training.slurm_cpus,
        "mem": None if training.slurm_memory is None else f"{training.slurm_memory}G",
        "array_parallelism": MOST_JOBS,  # the cluster's own limits apply
        "stderr_to_stdout": True,
        # Since version 22.05, srun does not take this number from the job.
        "srun_args": None if training.slurm_cpus is None else [f"--cpus-per-task={training.slurm_cpus}"],
        "additional_parameters": {"requeue": True, "signal": f"USR2@{SECONDS_BEFORE_LIMIT}"} | options,
    }
    executor.update_parameters(**parameters)
    return executor


def _submitit() -> Any:
    """Import submitit, but without its configuration of logging, which closes the streams of other handlers."""
    level = os.environ.pop("SUBMITIT_LOG_LEVEL", None)
    os.environ["SUBMITIT_LOG_LEVEL"] = "NOCONFIG"
    try:
        import submitit  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("--launcher=slurm needs the package submitit: pip install 'fedjax_mr[slurm]'") from None
    finally:
        del os.environ["SUBMITIT_LOG_LEVEL"]
        if level is not None:
            os.environ["SUBMITIT_LOG_LEVEL"] = level
    return submitit


def _submit(executor: Any, batches: Sequence[Sequence[PlannedRun]]) -> list[str]:
    """Submit a job for each batch, as one array, and return their ids."""
    try:
        with (
            _outside_of_jobs(),
            contextlib.redirect_stderr(io.StringIO()),
            executor.batch(),
        ):  # it prints the error, too
            # As text, because a node has not yet imported the files of --import.
            described = [[(configuration.to_flags(run.config), str(run.folder)) for run in runs] for runs in batches]
            jobs = [executor.submit(train_in_job, runs, str(executor.folder)) for runs in described]
    except _submitit().core.utils.FailedSubmissionError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"sbatch gave no number of a job ({reason}): squeue shows whether it has submitted one"
        ) from None
    except _submitit().core.utils.FailedJobError as error:
        words = [line.removeprefix("sbatch: error: ") for line in str(error).splitlines() if line.strip()]
        raise UserError(f"Slurm rejects the jobs: {'; '.join(words)} (see the flags --slurm_...)") from None
    return [job.job_id for job in jobs]


@contextlib.contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Hide the variables of the job in which this process runs, if it does: new jobs would inherit its limits."""
    hidden = {name: value for name, value in os.environ.items() if name.startswith("SLURM_") and name != "SLURM_CONF"}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other sweeps from submitting the same runs at the same time. They wait for each other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write into {folder} ({error.strerror})") from None
    # A link in a folder from another person would redirect what jobs write. Submitit's own have this name.
    for path in (folder, *folder.iterdir()):
        if path.is_symlink() and not path.name.startswith(".submission_file_"):
            raise UserError(f"{path} is a symbolic link, which is not allowed here: remove the link")
    end = time.monotonic() + SECONDS_TO_WAIT
    while True:
        try:
            descriptor = lock_file(folder / ".lock")
            break
        except TakenError:
            if time.monotonic() > end:
                raise UserError(f"another sweep has been submitting runs of {folder.parent} for long") from None
            time.sleep(0.1)
    try:
        yield
    finally:
        os.close(descriptor)


def _read_jobs(folder: Path) -> dict[str, str]:
    try:
        return untrusted.read_json(folder / JOBS, {str: JOB}, "remove the file once none of its jobs is in the queue")
    except FileNotFoundError:
        return {}


def _remove_files_of_others(folder: Path, states: Mapping[str, str]) -> None:
    """Remove submissions and results of jobs that Slurm does not know, before it gives numbers to new jobs.

    The folder may come from another person. A new job would execute a submission that has its number already, if it
    starts before submitit has written its own. A result that has its number already would be taken for its own.

    Raises:
      UserError: a file belongs to another user, whose jobs are not known here, or cannot be removed.
    """
    for path in folder.iterdir():
        match = NUMBERED.fullmatch(path.name)
        if match and match[1] not in states:
            if path.stat().st_uid != os.getuid():
                raise UserError(f"{path} belongs to another user: choose another --sweep_dir")
            try:
                path.unlink()
            except OSError as error:
                raise UserError(f"cannot remove {path}, which no job needs ({error.strerror})") from None


def _states() -> dict[str, str]:
    """The state of each job of this user that Slurm still knows, by its id.

    Raises:
      UserError: Slurm is not installed, or does not answer.
    """
    command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i %T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise _no_slurm() from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"Slurm does not answer: {' '.join(error.stderr.split())}") from None
    lines = [line.split() for line in done.stdout.splitlines()]
    return {words[0]: words[1] for words in lines if len(words) >= 2}


def _no_slurm() -> UserError:
    return UserError("--launcher=slurm needs Slurm's commands (sbatch, squeue, srun): use it on a node of the cluster")


def _count(jobs: Jobs) -> str:
    number = sum(map(len, jobs.values()))
    return f"{number} run{'' if number == 1 else 's'}"


def _arrays(jobs: Mapping[str, Any]) -> str:
    """The numbers of array jobs, for messages and for scancel."""
    return " ".join(dict.fromkeys(job.partition("_")[0] for job in jobs))


# --- Watching --------------------------------------------------------------------------------------------------------


def _watch(jobs: Jobs, folder: Path, bar: Bar) -> dict[Path, int]:
    """Wait until all jobs have ended, and return the exit codes of their runs by folder."""
    codes: dict[Path, int] = {}
    waiting = dict(jobs)
    states = before = dict.fromkeys(jobs, LIVE[0])
    try:
        while True:
            with contextlib.suppress(UserError):  # a busy controller; the next look may succeed
                before, states = states, _states()
            for job in list(waiting):
                # In two looks: a shared file system may show the result some seconds later.
                gone = states.get(job) not in LIVE and before.get(job) not in LIVE
                if gone or _result(job, folder) is not None:
                    codes |= _report(job, states.get(job), waiting.pop(job), folder, bar)
            if not waiting:
                return codes
            running = [run for job, runs in waiting.items() if states.get(job) == "RUNNING" for run in runs]
            bar.show_queue(running, sum(map(len, waiting.values())) - len(running))
            time.sleep(SECONDS_PER_LOOK)
    except KeyboardInterrupt:
        number = _arrays(waiting)
        message = f"the jobs go on; the same command shows them again, and scancel {number} cancels them"
        raise Interrupted(message, 128 + signal.SIGINT) from None


def _report(job: str, state: str | None, runs: Sequence[PlannedRun], folder: Path, bar: Bar) -> dict[Path, int]:
    """Say which runs of an ended job have failed, and return the exit codes by folder."""
    result = _result(job, folder)
    codes = {run.folder: code_of(run, result or 0) for run in runs}
    log = folder / f"{job}_0_log.out"
    for run in runs:
        if not codes[run.folder]:
            bar.finish(run)
            continue
        bar.leave(run)
        if result is None and run.state() != "diverged":
            done = f"{saved_round(run.folder) or 0} of {run.config.rounds} rounds are saved"
            reason = f"job {job} has ended early ({state or 'unknown to Slurm'}); {done}, the same command continues"
        else:
            reason = why(run, runs[0])
        bar.say(f"{run.folder}: {reason} (exit code {codes[run.folder]}; {log})")
    return codes


def _result(job: str, folder: Path) -> int | None:
    """The exit code of `train_in_job`, or None if it was stopped.

    Raises:
      UserError: the file with the code is not as `train_in_job` writes it.
    """
    path = _code_file(job, folder)
    try:
        text = "" if path.is_symlink() or path.stat().st_size > 4 else untrusted.read_text(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        text = ""
    if not CODE.fullmatch(text):
        raise UserError(f"{path} holds no exit code: remove it, and the same command continues")
    return int(text)


def _code_file(job: str, folder: Path) -> Path:
    return folder / f"{job}_code.txt"


# --- In a job --------------------------------------------------------------------------------------------------------


def train_in_job(described: Sequence[tuple[list[str], str]], folder: str) -> int:
    """Train the runs of a job, and write and return the exit code of a sweep on this node. They resume if they can.

    The code is text: reading submitit's own file of results would execute what another person has put there.

    Args:
      described: the flags and the folder of each run.
      folder: the folder of the jobs.
    """
    code = _train_in_job(described)
    with files.atomic_write(_code_file(_this_job(), Path(folder))) as path:
        path.write_text(f"{code}\n", encoding="utf-8")
    return code


def _this_job() -> str:
    """The id of the job of this process, as squeue shows it."""
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ["SLURM_JOB_ID"]
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else job


def _train_in_job(described: Sequence[tuple[list[str], str]]) -> int:
    near_limit = []

    def stop(number: int, frame: Any) -> None:
        near_limit.append(number)
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGUSR2, stop)
    alone = ["--num_processes=1", "--noprogress"]  # JAX would look for more processes of this job
    try:
        runs = [PlannedRun(configuration.parse([*flags, *alone]), {}, Path(folder)) for flags, folder in described]
        before = _rounds(runs)
        print(f"fedjax-mr: {', '.join(folder for _, folder in described)}: starts after round {before}", flush=True)
        return run_all(runs, batch=len(runs) > 1)
    except UserError as error:
        print(f"fedjax-mr: {error}", flush=True)
        return error.exit_code
    except Interrupted as stopped:
        print(f"fedjax-mr: stopped after round {_rounds(runs)}, saved", flush=True)
        if near_limit and _rounds(runs) > before:
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
        elif near_limit:
            print("fedjax-mr: no round was saved within the time limit: set a longer --slurm_time", flush=True)
        raise SystemExit(stopped.exit_code) from None  # without a result


def _rounds(runs: Sequence[PlannedRun]) -> int:
    """The number of saved rounds, of all runs together."""
    return sum(saved_round(run.folder) or 0 for run in runs)
