"""One fresh worker process per run: start it, pass signals on, record how it ended.

A process of its own because memory peaks, wandb and a kill for memory all leak from one run into the next otherwise.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrl_runs.runs import read_json
from mlxrl_runs.training.run_folder import read_run_json, record_end

WORKER_COMMAND = (sys.executable, "-m", "mlxrl_runs.worker")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KILL_ADVICE = {
    signal.SIGKILL: "Most often the system does this when memory runs out. "
    "Try memory.micro_batch_size=1, then a smaller rollout.max_completion_tokens, tasks_per_step or group_size.",
    signal.SIGABRT: "Native code gave up, often for want of memory: read run.log, then try memory.micro_batch_size=1.",
    signal.SIGSEGV: "Native code crashed: read run.log, and compare with model=tiny.",
    signal.SIGBUS: "Native code crashed, or a disk is full: read run.log and check free space.",
}


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: the worker's, or 128 + the signal that stopped it, or 1 when something else killed it.
        folder: the run's; None when the worker ended before it had one.
        stopped_by: the first signal this process passed on to the run, if any.
    """

    exit_code: int
    folder: Path | None
    stopped_by: int | None

    @property
    def record(self) -> dict[str, Any]:
        """run.json as it stands; empty without a folder."""
        return read_run_json(self.folder) if self.folder else {}

    @property
    def objective(self) -> float | None:
        """What a sweeper maximises: the final evaluation's success, None when the run measured none."""
        return read_objective(self.folder) if self.folder else None


def read_objective(folder: Path) -> float | None:
    """Success of the sampled policy in the evaluation after the run, as summary.json has it; None without one."""
    summary = read_json(folder / "summary.json")  # a full disk leaves half of one
    after = (summary.get("evaluation") or {}).get("after")
    return after["sampled"]["success"] if after else None


def supervise(
    config: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    overrides: Sequence[str] = (),
    sweep: Mapping[str, Any] | None = None,
    command: Sequence[str] = WORKER_COMMAND,
) -> Outcome:
    """Run one job in a worker process and wait for its end.

    Args:
        config: plain, resolved and validated; or what makes it, so that the worker imports its half in the meantime.
        sweep: {"name", "folder", "point"} of the sweep this run belongs to; `folder` is where the run writes.
        command: starts the worker.
    """
    _open_closed_streams()
    report, report_end = os.pipe()
    passed_on: list[int] = []
    with _signals_held():  # the worker inherits the mask and lifts it once its own handlers stand
        worker = subprocess.Popen(list(command), stdin=subprocess.PIPE, start_new_session=True, pass_fds=[report_end])
        os.close(report_end)
        restore = _pass_signals_on(worker, passed_on)
    try:
        composed = _compose(config, worker)
        _send(worker, {"config": composed, "overrides": list(overrides), "sweep": sweep, "report": report_end})
        status = worker.wait()
    finally:
        _end(worker)
        restore()
    folder = _read_folder(report)
    return Outcome(_settle(status, folder, passed_on), folder, passed_on[0] if passed_on else None)


def _open_closed_streams() -> None:
    """Put nothing where stdin, stdout or stderr was closed, before a pipe gets that number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one


def _compose(
    config: Mapping[str, Any] | Callable[[], Mapping[str, Any]], worker: "subprocess.Popen[bytes]"
) -> Mapping[str, Any]:
    """The config, made now where it has still to be made; the worker ends with what is wrong with it."""
    if not callable(config):
        return config
    try:
        return config()
    except BaseException:
        worker.kill()
        raise


@contextmanager
def _signals_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pass_signals_on(worker: "subprocess.Popen[bytes]", passed_on: list[int]) -> Callable[[], None]:
    """Forward each signal once. Returns: what puts the old handlers back.

    Only a main thread may handle signals; a launcher that runs jobs in threads stops them by its own means.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def forward(number: int, _frame: object) -> None:
        passed_on.append(number)
        worker.send_signal(number)

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup: the run outlives its terminal
    numbers = [number for number in FORWARDED if not (number == signal.SIGHUP and ignored)]
    before = {number: signal.signal(number, forward) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return restore


def _send(worker: "subprocess.Popen[bytes]", job: Mapping[str, Any]) -> None:
    """The first line on the worker's stdin; the pipe then stays open as long as this process lives."""
    assert worker.stdin is not None
    try:
        worker.stdin.write(json.dumps(job).encode() + b"\n")
        worker.stdin.flush()
    except BrokenPipeError:
        pass  # it ended already; its exit status tells why


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """Close the pipe. A worker that is still alive (we are leaving by an exception) ends because of it."""
    assert worker.stdin is not None
    with suppress(BrokenPipeError):
        worker.stdin.close()
    worker.wait()


def _read_folder(report: int) -> Path | None:
    """What the worker wrote once it had a folder. Never waits: a grandchild may hold the pipe's other end."""
    os.set_blocking(report, False)
    try:
        text = os.read(report, 65536).decode().strip()
    except BlockingIOError:
        text = ""
    finally:
        os.close(report)
    return Path(text) if text else None


def _settle(status: int, folder: Path | None, passed_on: Sequence[int]) -> int:
    """The exit code of a run, with run.json completed where the worker could not do it."""
    unfinished = folder is not None and read_run_json(folder).get("state") == "running"
    if status == 0 and (unfinished or folder is None):
        state, error, code = "failed", "its process ended before the run was over", 1
        print(f"The run failed: {error}", file=sys.stderr)
    elif status >= 0:
        state, error, code = ("interrupted" if status > 128 else "failed"), f"ended with exit code {status}", status
    elif -status in passed_on:
        state, error, code = "interrupted", f"stopped by {_signal_name(-status)}", 128 - status
    else:
        state, error, code = "failed", _killed(-status), 1
        print(f"The run failed: {error}", file=sys.stderr)
        print(f"What it wrote: {folder}" if folder else "It had not written anything yet.", file=sys.stderr)
    if unfinished and folder is not None:
        with suppress(OSError):  # a full disk, which the run has told about
            record_end(folder, state, code, error)
    return code


def _killed(number: int) -> str:
    advice = KILL_ADVICE.get(signal.Signals(number), "Start it again; nothing of this came from the run itself.")
    return f"its process was killed by {_signal_name(number)}. {advice}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
