"""The process that runs one job. Its supervisor writes the job to its stdin and keeps that pipe open.

Importing MLX and what goes with it takes longest, and overlaps with the composing of the config on the other side.
Nothing is computed before the folder, the log and the signal handlers stand.
"""

import contextlib
import faulthandler
import io
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from mlxrl_runs.config import RunConfig, config_hash, validate
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.errors import ConfigError, Interrupted, MlxrlError
from mlxrl_runs.training.run_folder import RunFolder, record_end, start_record

Execute = Callable[..., Mapping[str, Any]]
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FULL_DISK_BYTES = 128 * 1024  # what is left when a file no longer fits
GRACE_SECONDS = 5.0  # for saving, once the supervisor has gone
ESCAPE_CODES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


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
    aside = None
    if job.sweep is None:
        folder = RunFolder.create(config.paths.output, config.run_name)
    else:
        folder, aside = RunFolder.create_at(job.sweep["folder"], config.paths.output)
    os.write(job.report, f"{folder.path}\n".encode())
    os.close(job.report)
    folder.write_text("config.yaml", _yaml(config.plain()))
    record = start_record(config.plain(), config.run_name, job.overrides, config_hash(config), job.sweep)
    folder.write_json("run.json", record)
    if aside is not None:
        print(f"An earlier attempt at this point was moved to {aside}", file=sys.stderr)
    return folder


def _yaml(plain: Mapping[str, Any]) -> str:
    import yaml  # type: ignore[import-untyped]

    return yaml.safe_dump(dict(plain), sort_keys=False, allow_unicode=True)


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
        state, code, error = "failed", _exit_code(failure), _one_line(failure, folder)
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


def _exit_code(failure: BaseException) -> int:
    return failure.exit_code if isinstance(failure, MlxrlError) else 1


def _one_line(failure: BaseException, folder: RunFolder) -> str:
    if isinstance(failure, MlxrlError):
        return str(failure)
    if isinstance(failure, SystemExit):
        return f"something in the run called exit({failure.code!r}), its environment perhaps"
    text = f"{type(failure).__name__}: {failure}"
    if shutil.disk_usage(folder.path).free < FULL_DISK_BYTES:
        return f"the disk is full ({text}). Free some space, or give another folder: paths.output=DIR"
    return text


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


class Tee:
    """A text stream that also writes complete lines, without escape codes, to a log.

    The terminal stays what it was (`isatty`); when it goes away, the log goes on.
    """

    def __init__(self, stream: TextIO, log: TextIO, lock: threading.Lock):
        self._stream: TextIO | None = stream
        self._log = log
        self._lock = lock
        self._line = ""
        self.encoding = stream.encoding
        self.errors = stream.errors

    def write(self, text: str) -> int:
        with self._lock:
            self._to_terminal(text)
            self._to_log(text)
        return len(text)

    def log_only(self, text: str) -> None:
        with self._lock:
            self._to_log(text)

    def flush(self) -> None:
        with self._lock, self._terminal_may_be_gone():
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the terminal is gone")
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def close_line(self) -> None:
        """Write out a last line that had no end."""
        if self._line:
            self.log_only("\n")

    def _to_terminal(self, text: str) -> None:
        with self._terminal_may_be_gone():
            if self._stream is not None:
                self._stream.write(text)

    def _to_log(self, text: str) -> None:
        *complete, self._line = (self._line + text).split("\n")
        with contextlib.suppress(OSError):  # a full disk: what is printed still reaches the terminal
            for line in complete:
                plain = ESCAPE_CODES.sub("", line).rstrip("\r").rpartition("\r")[2]  # a progress bar's last state
                self._log.write(plain + "\n")
            if complete:
                self._log.flush()

    @contextlib.contextmanager
    def _terminal_may_be_gone(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._stream = None


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
