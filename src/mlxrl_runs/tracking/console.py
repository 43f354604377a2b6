"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere."""

import atexit
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO, cast, runtime_checkable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mlxrl_runs.core.protocols import RunRecord, TrajectoryRecord
from mlxrl_runs.tracking.closing import closing_words
from mlxrl_runs.tracking.drawing import printable, readable_bytes, readable_path, readable_seconds, sparkline

PLAIN_LINES = 50  # a longer run prints every second, third ... step
REFRESHES_PER_SECOND = 2
TREND_WIDTH = 24


def _decimals(places: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{places}f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


# metric, its label in the table, its label in a plain line, how it is written
SHOWN: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("reward/mean", "reward", "reward", _decimals(3)),
    ("reward/success", "success", "success", _decimals(3)),
    ("kl/reference", "KL to reference", "kl", _decimals(4)),
    ("advantage/std", "advantage spread", "advantage std", _decimals(3)),
    ("memory/peak_bytes", "memory peak", "memory", readable_bytes),
    ("rollout/tokens_per_second", "rollout tokens/s", "tokens/s", _whole),
)


@runtime_checkable
class LoggedStream(Protocol):
    """A stream that also keeps a log; `log_only` reaches the log and not the terminal."""

    def log_only(self, text: str) -> None: ...


def plain_line(step: int, steps: int, metrics: Mapping[str, float], seconds_left: float | None) -> str:
    """A step in one line; a metric that is not there is left out."""
    shown = [f"{short} {write(metrics[name])}" for name, _, short, write in SHOWN if name in metrics]
    left = f"left {readable_seconds(seconds_left)}" if seconds_left is not None else ""
    return "  ".join(part for part in (f"step {step:>{len(str(steps))}}/{steps}", *shown, left) if part)


class ConsoleTracker:
    """Progress, evaluations and the closing summary of one run.

    On a terminal the table is redrawn in place, everything else that is printed scrolls above it, and a log that
    stands behind stdout gets the plain lines instead of the pictures.

    Args:
        console: where to write; its own settings decide about colour and width.
        steps: how many there will be; 0 where the record given to `start` knows.
    """

    def __init__(self, console: Console, steps: int = 0):
        self._console = console
        self._steps = steps
        self._history: dict[str, list[float]] = {}
        self._step = 0
        self._trains = True
        self._times: list[float] = []
        self._display: LiveDisplay | None = None
        self._sample = ""

    def start(self, run: RunRecord) -> None:
        self._steps = self._steps or run.steps
        self._trains = run.job == "train"
        steps = f", {self._steps} steps" if self._trains else ""
        self._print(Text.assemble((run.name, "bold"), f"  {run.job}{steps}, in {readable_path(run.folder)}"))
        if self._trains and _can_redraw(self._console):
            self._display = LiveDisplay(self._console, self._view, self._steps)
            self._display.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._times.append(time.monotonic())
        for name, value in metrics.items():
            if math.isfinite(value):
                self._history.setdefault(name, []).append(value)
        every = max(1, math.ceil(self._steps / PLAIN_LINES))
        shows_something = any(name in metrics for name, *_ in SHOWN)
        line = self._line(metrics) if shows_something and (step % every == 0 or step in (1, self._steps)) else None
        if self._display is not None:
            self._display.advance(step, line)
        elif line is not None:
            self._print(line)

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryRecord]) -> None:
        """Show the last action of one episode, the best paid one."""
        best = max(trajectories, key=lambda record: record.trajectory.total_reward, default=None)
        if best is not None and best.trajectory.turns:
            self._sample = f"{best.trajectory.total_reward:.2f} for: {best.trajectory.turns[-1].text}"

    def log_evaluation(self, when: str, evaluation: Mapping[str, Any]) -> None:
        scores = [f"{name} {score['success']:.3f}" for name, score in evaluation.items() if "success" in score]
        text = Text.assemble(("held-out success", "bold"), f" {when}".rstrip(), f": {', '.join(scores)}")
        if scores:
            self._console.print(text, highlight=False, soft_wrap=not self._console.is_terminal)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Take the live table away and print what came out."""
        if self._display is not None:
            self._display.stop()
            self._display = None
        for part in closing_words(summary, exit_code, self._history.get("reward/mean", ()), self._console):
            self._console.print(part, highlight=False, soft_wrap=isinstance(part, Text))

    def _print(self, text: Text | str) -> None:
        self._console.print(Text(text) if isinstance(text, str) else text, highlight=False, soft_wrap=True)

    def _line(self, metrics: Mapping[str, float]) -> str:
        return plain_line(self._step, self._steps, metrics, self._seconds_left())

    def _seconds_left(self) -> float | None:
        if len(self._times) < 2:
            return None
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1) * (self._steps - self._step)

    def _view(self) -> RenderableType:
        """The table: each number now, at the first step, and its course between."""
        table = Table(box=None, padding=(0, 2), header_style="dim")
        table.add_column("", style="cyan")
        table.add_column("now", justify="right", style="bold")
        table.add_column("first", justify="right", style="dim")
        table.add_column("course", style="green", no_wrap=True)
        for name, label, _, write in SHOWN:
            history = self._history.get(name)
            if history:
                course = sparkline(history, TREND_WIDTH, ascii_only=self._console.options.ascii_only)
                table.add_row(label, write(history[-1]), write(history[0]), course)
        if not table.row_count:
            return Text("  waiting for the first step", style="dim")
        sample = printable(self._sample, self._console.width - 20)
        return Group(table, Text.assemble(("  best sample  ", "cyan"), sample)) if sample else table


class LiveDisplay:
    """A progress bar and a table that stay at the bottom of the terminal.

    While it stands, sys.stdout and sys.stderr print above it. The frames go to the terminal itself, past a stream that
    keeps a log: a log of frames can be read by nobody.
    """

    def __init__(self, console: Console, view: Callable[[], RenderableType], steps: int):
        self._console = console
        self._view = view
        self._file = console.file
        self._screen = _console_on(_terminal(self._file), console)
        self._progress = Progress(
            TextColumn("  step"), MofNCompleteColumn(), BarColumn(None), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=self._screen, expand=True,
        )  # fmt: skip
        self._task = self._progress.add_task("steps", total=steps or None)
        self._live = Live(
            get_renderable=self._frame, console=self._screen, transient=True, redirect_stdout=False,
            redirect_stderr=False, refresh_per_second=REFRESHES_PER_SECOND,
        )  # fmt: skip
        self._before: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
        self._owns_file = False

    def start(self) -> None:
        self._before = (sys.stdout, sys.stderr)
        self._owns_file = self._file not in self._before
        self._live.start()
        self._screen.show_cursor(True)  # a process that is killed must not leave a terminal without one
        out, error = (Above(stream, self._screen) if stream.isatty() else stream for stream in self._before)
        sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, error)
        if self._owns_file:
            self._console.file = cast(TextIO, Above(self._file, self._screen))
        atexit.register(self.stop)

    def advance(self, step: int, line: str | None) -> None:
        """Show that `step` is done; `line` is for the log behind the terminal, if there is one."""
        self._progress.update(self._task, completed=step)
        if line is not None and isinstance(self._before[0], LoggedStream):
            self._before[0].log_only(line + "\n")

    def stop(self) -> None:
        atexit.unregister(self.stop)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Above):
                stream.close_line()
        sys.stdout, sys.stderr = self._before
        if self._owns_file:
            self._console.file = self._file
        self._live.stop()

    def _frame(self) -> RenderableType:
        return Group(Text(), self._view(), Text(), self._progress)


class Above:
    """A text stream whose lines appear above a live display, and in the log of the stream it stands for."""

    def __init__(self, stream: Any, screen: Console):
        self._stream = stream
        self._screen = screen
        self._line = ""
        self._lock = threading.Lock()
        self.encoding = stream.encoding
        self.errors = stream.errors

    def write(self, text: str) -> int:
        with self._lock:
            *complete, self._line = (self._line + text).split("\n")
        for line in complete:
            self._screen.print(Text.from_ansi(line), highlight=False, soft_wrap=True)
        if isinstance(self._stream, LoggedStream):
            self._stream.log_only(text)
        return len(text)

    def flush(self) -> None:
        """Nothing to do: complete lines are shown at once, an incomplete one waits for its end."""

    def isatty(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def close_line(self) -> None:
        """Show a last line that had no end."""
        if self._line:
            self.write("\n")


def _can_redraw(console: Console) -> bool:
    return console.is_interactive and console.file.isatty()


def _terminal(file: Any) -> Any:
    """The terminal behind a stream that keeps a log; any other stream itself."""
    return sys.__stdout__ if isinstance(file, LoggedStream) else file


def _console_on(file: Any, like: Console) -> Console:
    """A console on `file` that looks like another one."""
    return Console(file=file, force_terminal=True, no_color=like.no_color, color_system=cast(Any, like.color_system))
