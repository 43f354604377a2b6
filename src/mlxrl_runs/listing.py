"""`mlxrl-runs ls`, `show` and `tail`: what runs there are, one of them, and how it goes. Imports no MLX."""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from mlxrl_runs.errors import ConfigError
from mlxrl_runs.runs import SUCCESS, RecordedRun, find_run, parsed, read_json, read_run, run_folders, run_name

LISTED = 20  # runs, unless -n or --all says otherwise
TAILED = 10  # lines
POLL_SECONDS = 0.3
GAP = "  "
SHORTEST_NAME = 16


def main(words: Sequence[str]) -> int:
    """Do what `ls ...`, `show ...` or `tail ...` says and return the exit code.

    Raises: ConfigError for wrong arguments, or a run that is not there.
    """
    arguments = _parser().parse_args(list(words))
    do: Callable[[argparse.Namespace], None] = {"ls": _ls, "show": _show, "tail": _tail}[arguments.command]
    try:
        do(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See: {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("mlxrl-runs", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    ls = commands.add_parser("ls", help="list runs, newest first", allow_abbrev=False)
    many = ls.add_mutually_exclusive_group()
    many.add_argument("--all", action="store_true", help="every run, and attempts that a later one replaced")
    many.add_argument("-n", type=_count, default=LISTED, metavar="N", help=f"at most N runs; {LISTED} unless given")
    show = commands.add_parser("show", help="one run in full", allow_abbrev=False)
    tail = commands.add_parser("tail", help="a run's last steps", allow_abbrev=False)
    tail.add_argument("-n", type=_count, default=TAILED, metavar="N", help=f"at most N lines; {TAILED} unless given")
    tail.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    for command in (show, tail):
        command.add_argument("run", nargs="?", metavar="RUN", help="its folder or a part of its name; default: newest")
    for command in (ls, show):
        command.add_argument("--json", action="store_true", help="for programs")
    for command in (ls, show, tail):
        command.add_argument("--output", default="outputs", metavar="DIR", help="where runs were written (outputs)")
    return parser


def completions(command: str) -> list[str]:
    """Words that may follow a command: its flags, and the names of runs for those that take one."""
    [choices] = [action.choices for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    flags = [flag for action in choices[command]._actions for flag in action.option_strings]
    if command == "ls":
        return flags
    folders = run_folders("outputs")
    return [*flags, *dict.fromkeys(word for folder in folders for word in (folder.name, run_name(folder)))]


def _count(text: str) -> int:
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a whole number >= 1")
    return number


# ---- ls


def _ls(arguments: argparse.Namespace) -> None:
    if not Path(arguments.output).expanduser().is_dir():
        raise ConfigError(f"--output: {arguments.output} is no folder. Give the one that runs were written to.")
    folders = run_folders(arguments.output, with_superseded=arguments.all)
    shown = [read_run(folder, arguments.output) for folder in folders[: None if arguments.all else arguments.n]]
    if arguments.json:
        print(json.dumps([as_plain(run) for run in shown], indent=2))
        return
    if not shown:
        print(f"no runs in {arguments.output}. Start one: python -m mlxrl_runs")
        return
    for line in table(shown, shutil.get_terminal_size().columns if sys.stdout.isatty() else None):
        print(line)
    if len(folders) > len(shown):
        print(f"{len(folders) - len(shown)} older ones: --all")


def as_plain(run: RecordedRun) -> dict[str, Any]:
    """A run for JSON: its fields without the whole of run.json."""
    return {
        part.name: str(value) if isinstance(value, Path) else value
        for part in fields(run)
        if part.name != "record"
        for value in [getattr(run, part.name)]
    }


def table(runs: Sequence[RecordedRun], width: int | None) -> list[str]:
    """A header and a line a run.

    Args: width: letters of a line; columns that matter less are left out, then names cut. None: everything whole.
    """
    from mlxrl_runs.tracking.drawing import readable_bytes, readable_seconds

    columns: dict[str, Callable[[RecordedRun], str]] = {
        "started": lambda run: f"{run.when:%m-%d %H:%M}" if run.when else "",
        "name": lambda run: run.name,
        "state": lambda run: run.state,
        "steps": lambda run: "" if run.steps_done is None else f"{run.steps_done}/{run.steps_asked or '?'}",
        "success": lambda run: _before_after(run.success_before, run.success_after),
        "reward": lambda run: "" if run.reward is None else f"{run.reward:.3f}",
        "memory": lambda run: "" if run.peak_bytes is None else readable_bytes(run.peak_bytes),
        "time": lambda run: "" if run.seconds is None else readable_seconds(run.seconds),
        "folder": lambda run: run.place,
    }
    cells = {title: [title, *map(write, runs)] for title, write in columns.items()}
    for title in ("folder", "memory", "reward"):
        if width is not None and _width_of(cells) > width:
            del cells[title]
    if width is not None and (excess := _width_of(cells) - width) > 0:
        longest = max(max(map(len, cells["name"])) - excess, SHORTEST_NAME)
        cells["name"] = [_cut(name, longest) for name in cells["name"]]
    return [GAP.join(line).rstrip() for line in zip(*(_padded(column) for column in cells.values()), strict=True)]


def _before_after(before: float | None, after: float | None) -> str:
    shown = ["-" if value is None else f"{value:.2f}" for value in (before, after)]
    return "" if before is None and after is None else " -> ".join(shown)


def _width_of(cells: Mapping[str, Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in cells.values()) + len(GAP) * (len(cells) - 1)


def _cut(text: str, longest: int) -> str:
    """The end of a name tells more than its middle: the seed stands there."""
    kept = longest - 1
    return text if len(text) <= longest else f"{text[: kept - kept // 2]}~{text[len(text) - kept // 2 :]}"


def _padded(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) for cell in column]


# ---- show


def _show(arguments: argparse.Namespace) -> None:
    folder = find_run(arguments.output, arguments.run)
    run = read_run(folder, arguments.output)
    summary = read_json(folder / "summary.json")
    evaluation = summary.get("evaluation") or read_json(folder / "evaluation.json")
    files = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
    if arguments.json:
        whole = {**as_plain(run), "record": run.record, "evaluation": evaluation, "summary": summary, "files": files}
        print(json.dumps(whole, indent=2))
        return
    for label, text in _details(run, files):
        print(f"{label:<10}{text}".rstrip())
    _print_results(run, {**summary, "evaluation": evaluation})


def _details(run: RecordedRun, files: Sequence[str]) -> Iterator[tuple[str, str]]:
    from mlxrl_runs.tracking.drawing import readable_bytes

    record = run.record
    yield "run", run.name
    yield "folder", str(run.folder)
    steps = f", {run.steps_done} of {run.steps_asked} steps" if run.steps_asked else ""
    yield "state", f"{run.state}, job={run.job}{steps}"
    if run.when is not None:
        yield "started", f"{run.when:%Y-%m-%d %H:%M:%S}"
    if record.get("error"):
        yield "error", record["error"]
    for key in ("notes", "tags"):
        if record.get(key):
            yield key, record[key] if isinstance(record[key], str) else ", ".join(record[key])
    yield "overrides", shlex.join(record.get("overrides") or []) or "none"
    device = record.get("device")
    if device:
        parts = [device["backend"], device["blas"], device["name"], readable_bytes(device["memory_bytes"])]
        yield "device", ", ".join(part for part in parts if part)
    yield "versions", ", ".join(f"{name} {number}" for name, number in (record.get("versions") or {}).items() if number)
    for key in ("git_commit", "wandb_id"):
        if record.get(key):
            yield key.split("_")[0], record[key]
    yield "files", " ".join(files)


def _print_results(run: RecordedRun, summary: Mapping[str, Any]) -> None:
    """The last screen of a run, from what its files hold by now."""
    from rich.console import Console
    from rich.text import Text

    from mlxrl_runs.tracking.closing import closing_words

    console = Console()
    rewards = [row["reward/mean"] for row in read_metrics(run.folder) if row.get("reward/mean") is not None]
    known = {"steps": run.steps_done, "seconds": {"total": run.seconds}, **summary, "state": run.state}
    for part in closing_words(known, run.record.get("exit_code") or 0, rewards, console):
        console.print(part, highlight=False, soft_wrap=isinstance(part, Text))


# ---- tail


def _tail(arguments: argparse.Namespace) -> None:
    folder = find_run(arguments.output, arguments.run)
    run = read_run(folder, arguments.output)
    print(f"{run.name}{GAP}{run.state}{GAP}{folder}")
    lines = MetricLines(folder, run.steps_asked or run.steps_done or 0)
    for line in list(lines.new())[-arguments.n :]:
        print(line, flush=True)
    while arguments.follow and run.state == "running":
        time.sleep(POLL_SECONDS)
        run = read_run(folder, arguments.output)  # before the lines: none is then missed at the end
        for line in lines.new():
            print(line, flush=True)
    if arguments.follow:
        print(f"{run.state}" + (f": {run.record['error']}" if run.record.get("error") else ""))


class MetricLines:
    """The steps of a run as the console prints them, each once.

    Args: steps: how many the run was asked for.
    """

    def __init__(self, folder: Path, steps: int):
        self._file = folder / "metrics.jsonl"
        self._steps = steps
        self._read_bytes = 0

    def new(self) -> Iterator[str]:
        """Lines for what was written since the last call; a line that has no end yet waits."""
        if not self._file.is_file():
            return
        with self._file.open("rb") as file:
            file.seek(self._read_bytes)
            complete = file.read().rpartition(b"\n")[0]
        if not complete:
            return
        self._read_bytes += len(complete) + 1
        for text in complete.splitlines():
            if "step" in (row := parsed(text)):  # another line is damaged
                yield from self._lines(row)

    def _lines(self, row: Mapping[str, Any]) -> Iterator[str]:
        from mlxrl_runs.tracking.console import plain_line

        metrics = {name: value for name, value in row.items() if isinstance(value, int | float)}
        step, seconds = row["step"], metrics.get("progress/seconds")
        left = None if seconds is None or step < 1 else seconds / step * max(self._steps - step, 0)
        if "reward/mean" in metrics:
            yield plain_line(step, self._steps, metrics, left)
        if SUCCESS in metrics:
            scores = {name: metrics.get(f"eval/{name}_success") for name in ("sampled", "greedy", "random", "oracle")}
            shown = ", ".join(f"{name} {value:.3f}" for name, value in scores.items() if value is not None)
            yield f"held-out success at step {step}: {shown}"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl, without those that are damaged."""
    file = folder / "metrics.jsonl"
    text = file.read_bytes().rpartition(b"\n")[0] if file.is_file() else b""
    return [row for line in text.splitlines() if (row := parsed(line))]
