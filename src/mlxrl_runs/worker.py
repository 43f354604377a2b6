"""The process that runs one job. Its supervisor writes the job to its stdin and keeps that pipe open.

Importing MLX and what goes with it takes longest, and overlaps with the composing of the config on the other side.
Nothing is computed before the folder, the log and the signal handlers stand.
"""

import contextlib
import faulthandler
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlxrl_runs.config import RunConfig, validate
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.errors import ConfigError, Interrupted, MlxrlError
from mlxrl_runs.lifecycle import begin_folder, exit_code, one_line
from mlxrl_runs.policy.source import locate
from mlxrl_runs.schema import ModelSettings, ModelSource
from mlxrl_runs.tee import Tee
from mlxrl_runs.training.run_folder import RunFolder, record_end

Execute = Callable[..., object]
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_SECONDS = 5.0  # for saving, once the supervisor has gone


@dataclass(frozen=True)
class Job:
    """What the supervisor asked for; `report` is the descriptor on which the folder is told."""

    config: dict[str, Any]
    overrides: tuple[str, ...]
    sweep: dict[str, Any] | None
    report: int


def main(execute: Execute | None = None) -> int:
    """Run the job on stdin and return the exit code.

    Args: execute: what does the work; `mlxrl_runs.run.execute` unless a test brings its own.
    """
    stop = StopRequest()
    if execute is None:
        with contextlib.suppress(Exception):  # what is wrong is told once the job's folder and log stand
            _execute()
    try:
        pipe, job = _receive()
        _handle_signals(stop)
        config = validate(job.config)
        _find_model(config.model, stop)
        folder = _make_folder(config, job)
    except MlxrlError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    threading.Thread(target=_watch, args=(pipe, stop, folder), daemon=True).start()
    with _tee(folder):
        return _run(execute, config, folder, job, stop)


def _receive() -> tuple[int, Job]:
    """Read the job from stdin, then put nothing in stdin's place so that no library can read the pipe."""
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    line = b""
    while not line.endswith(b"\n") and (part := os.read(pipe, 65536)):
        line += part
    try:
        job = Job(**json.loads(line))
    except (ValueError, TypeError):
        raise ConfigError("A worker is started by a run, not by hand. Try: python -m mlxrl_runs --help") from None
    os.set_inheritable(job.report, False)
    return pipe, job


def _find_model(model: ModelSettings, stop: StopRequest) -> None:
    """Make sure that the model's files are here, fetched if need be, before a folder is made."""
    if model.source != ModelSource.HUB:
        locate(model.source, model.path, model.revision)
        return
    stop.raise_if_requested()
    before = {number: signal.getsignal(number) for number in HANDLED}
    for number in HANDLED:  # a download cannot be asked to stop, and nothing is there to save
        if before[number] != signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: os._exit(128 + number))
    locate(model.source, model.path, model.revision)
    for number in HANDLED:
        signal.signal(number, before[number])


def _handle_signals(stop: StopRequest) -> None:
    """The first signal asks for a stop, the second ends the process at once."""

    def handle(number: int, _frame: object) -> None:
        if stop.signal_number is not None:
            os._exit(128 + number)
        stop.signal_number = number

    _exit_at_the_second_signal()
    for number in HANDLED:
        if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN):
            signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


def _exit_at_the_second_signal() -> None:
    """Watch signals from a thread: Python's own handlers wait until a long evaluation in MLX returns."""
    watched, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def watch() -> None:
        seen: list[int] = []
        while len(seen) < 2:
            seen += [number for number in os.read(watched, 64) if number in HANDLED]
        os._exit(128 + seen[1])

    threading.Thread(target=watch, daemon=True).start()


def _make_folder(config: RunConfig, job: Job) -> RunFolder:
    """The run's folder with config.yaml and run.json in it; the supervisor is told where it is."""
    folder, aside = begin_folder(config, job.overrides, job.sweep)
    os.write(job.report, f"{folder.path}\n".encode())
    os.close(job.report)
    if aside is not None:
        print(f"An earlier attempt at this point was moved to {aside}", file=sys.stderr)
    return folder


def _watch(pipe: int, stop: StopRequest, folder: RunFolder) -> None:
    """When the supervisor is gone, its end of the pipe closes: stop, and after a grace period end regardless."""
    while os.read(pipe, 4096):
        pass
    if stop.signal_number is None:
        stop.signal_number = signal.SIGTERM
    time.sleep(GRACE_SECONDS)
    code = 128 + signal.SIGTERM
    with contextlib.suppress(OSError, ValueError):
        record_end(
            folder.path, "interrupted", code, f"its supervisor ended; not saved within {GRACE_SECONDS:g} seconds"
        )
    os._exit(code)


def _run(execute: Execute | None, config: RunConfig, folder: RunFolder, job: Job, stop: StopRequest) -> int:
    """Do the work and put its end into words, run.json and an exit code."""
    state, code, error = "finished", 0, None
    try:
        (execute or _execute())(config, folder, overrides=job.overrides, sweep=job.sweep, stop=stop)
    except Interrupted as interrupted:
        state, code, error = "interrupted", interrupted.exit_code, str(interrupted)
        name = signal.Signals(interrupted.exit_code - 128).name
        print(f"Stopped by {name}. What was reached is saved in {folder.path}", file=sys.stderr)
    except BaseException as failure:  # an environment may call exit(): the run has not finished all the same
        state, code, error = "failed", exit_code(failure), one_line(failure, folder.path)
        _tell(failure, error, folder)
    try:
        record_end(folder.path, state, code, error)
    except OSError as trouble:
        print(f"run.json could not be completed: {trouble}", file=sys.stderr)
    return code


def _execute() -> Execute:
    """This is where MLX comes in; cheap the second time."""
    from mlxrl_runs.run import execute

    return execute


def _tell(failure: BaseException, text: str, folder: RunFolder) -> None:
    """One message for the terminal; the traceback goes into run.log, or to both when HYDRA_FULL_ERROR=1."""
    trace = "".join(traceback.format_exception(failure))
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        print(trace, file=sys.stderr)
    elif isinstance(sys.stderr, Tee):
        sys.stderr.log_only(trace)
    print(f"The run failed: {text}", file=sys.stderr)
    if not isinstance(failure, MlxrlError):
        print(f"Traceback: {folder.path / 'run.log'} (or on the terminal with HYDRA_FULL_ERROR=1)", file=sys.stderr)


@contextlib.contextmanager
def _tee(folder: RunFolder) -> Iterator[None]:
    """Send what is printed to run.log too, until the process ends."""
    log = open(folder.path / "run.log", "a", encoding="utf-8")  # noqa: SIM115 - stays open for late threads
    faulthandler.enable(log)
    lock = threading.Lock()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without a letter ends no run
    out, err = Tee(sys.stdout, log, lock), Tee(sys.stderr, log, lock)
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield
    finally:
        for tee in (out, err):
            tee.close_line()
            tee.flush()


if __name__ == "__main__":
    sys.exit(main())
