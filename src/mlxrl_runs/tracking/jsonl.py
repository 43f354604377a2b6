"""The source of truth: one flushed line a step in metrics.jsonl, one line an episode in trajectories.jsonl."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from mlxrl_runs.core.protocols import RunRecord, TrajectoryRecord

METRICS_FILE = "metrics.jsonl"
TRAJECTORIES_FILE = "trajectories.jsonl"


class JsonlTracker:
    """Writes the run folder's own record. Its errors are the run's errors: nothing is ever lost silently.

    A line is a function of the numbers alone (keys sorted, floats in Python's shortest exact form), so equal runs
    write equal bytes. JSON has no NaN and no infinity: such a number becomes `null`, and the line's `"nonfinite"`
    names it with what it was (`{"loss/total": "nan"}`).

    Args: folder: the run folder; lines are added to files that already hold some, so a resumed run goes on.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._metrics: TextIO | None = None
        self._trajectories: TextIO | None = None
        self._last_step: int | None = None

    def start(self, run: RunRecord) -> None:
        """Open both files behind their last complete line.

        Raises: OSError when the folder cannot be written.
        """
        self._last_step = _last_step(_cut_torn_line(self._folder / METRICS_FILE))
        _cut_torn_line(self._folder / TRAJECTORIES_FILE)
        self._metrics = (self._folder / METRICS_FILE).open("a", encoding="utf-8")
        self._trajectories = (self._folder / TRAJECTORIES_FILE).open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line.

        Raises: ValueError when `step` is not above the last one written.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"step {step} was logged after step {self._last_step}: the step axis of {METRICS_FILE} never goes "
                "back. Log each step once, all of its metrics together."
            )
        _write(self._metrics, {"step": step, **_line(metrics)})
        self._last_step = step

    def log_trajectories(self, step: int, trajectories: Sequence[TrajectoryRecord]) -> None:
        """Write one line an episode."""
        for record in trajectories:
            _write(self._trajectories, episode(step, record))

    def log_evaluation(self, when: str, evaluation: Mapping[str, Any]) -> None:
        """Nothing: the run writes evaluation.json, and a step's own eval/* numbers come with its metrics."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        for file in (self._metrics, self._trajectories):
            if file is not None:
                file.close()
        self._metrics = self._trajectories = None


def episode(step: int, record: TrajectoryRecord) -> dict[str, Any]:
    """One episode as plain data: what the model read and wrote, and what that earned.

    `advantage` of a turn is the number each of its tokens was given, null where nothing was trained on it.
    """
    trajectory = record.trajectory
    advantages = record.turn_advantages or (None,) * len(trajectory.turns)
    turns = [
        {
            "observation": turn.observation_text, "text": turn.text, "reward": _number(turn.reward),
            "reward_parts": {name: _number(part) for name, part in sorted(turn.reward_parts.items())},
            "state": turn.state, "advantage": None if advantage is None else _number(advantage),
            "stop": turn.stop.value,
        }
        for turn, advantage in zip(trajectory.turns, advantages, strict=True)
    ]  # fmt: skip
    return {
        "step": step, "task": record.task, "member": record.member, "success": trajectory.success,
        "return": _number(trajectory.total_reward), "end": trajectory.end.value, "turns": turns,
    }  # fmt: skip


def _line(metrics: Mapping[str, float]) -> dict[str, Any]:
    line: dict[str, Any] = {name: _number(metrics[name]) for name in sorted(metrics)}
    lost = {name: str(float(metrics[name])) for name, value in line.items() if value is None}
    return {**line, "nonfinite": lost} if lost else line


def _number(value: float) -> float | None:
    """A number JSON can hold: integers stay integers, what is not finite becomes None."""
    if isinstance(value, int):
        return int(value)
    return float(value) if math.isfinite(value) else None


def _write(file: TextIO | None, line: Mapping[str, Any]) -> None:
    if file is None:
        raise ValueError("JsonlTracker was asked to log before start() or after finish().")
    file.write(json.dumps(line, allow_nan=False) + "\n")
    file.flush()


def _cut_torn_line(path: Path) -> bytes:
    """Drop a last line that a killed process left half written, and return what stays."""
    if not path.exists():
        return b""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole


def _last_step(content: bytes) -> int | None:
    lines = content.splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else None
