"""Finds runs and what lies in them. Light imports only."""

import difflib
import fcntl
import json
import os
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from mlxrl_runs.errors import ConfigError
from mlxrl_runs.training.run_folder import LOCK_FILE

WEIGHTS = ("adapters", "model")  # of a finished run: an adapter, or everything after full training
LIST_COMMAND = "python -m mlxrl_runs ls"
SUPERSEDED = re.compile(r"_attempt\d+$")
SUCCESS = "eval/sampled_success"
LONGEST_LINE = 65536  # bytes of one line of metrics.jsonl; a step's takes 3 KB
AMBIGUOUS_SHOWN = 5


@dataclass(frozen=True)
class SavedWeights:
    """Weights of a run.

    Attributes: run: the run's folder; folder: where the weights lie in it.
    """

    run: Path
    folder: Path


def find_weights(given: str) -> SavedWeights:
    """The weights meant by a run's folder (the final ones, else the newest checkpoint's), or by a folder inside one.

    Raises: ConfigError when there is no such folder, no run around it, or no weights in it.
    """
    folder = Path(given).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"RUN_DIR: {given} is no folder. Give a run's, say outputs/latest. See: {LIST_COMMAND}")
    around = [place for place in (folder, *folder.parents[:2]) if (place / "run.json").is_file()]
    if not around:
        raise ConfigError(
            f"RUN_DIR: {given} is no run folder and lies in none: there is no run.json. To see runs: {LIST_COMMAND}"
        )
    run = around[0]
    places = [folder] if folder != run else [*(run / name for name in WEIGHTS), *complete_checkpoints(run)]
    found = [place for place in places if any(place.glob("*.safetensors"))]
    if not found:
        raise ConfigError(
            f"RUN_DIR: {given} holds no weights: the run saved none, or only evaluated. To see runs: {LIST_COMMAND}"
        )
    return SavedWeights(run, found[0])


def complete_checkpoints(run: Path) -> list[Path]:
    """Newest first; one without a manifest was not finished."""
    return sorted((file.parent for file in run.glob("checkpoints/step_*/manifest.json")), reverse=True)


# ---- what runs there are, and how far they came


@dataclass(frozen=True)
class RecordedRun:
    """What a run's files say about it; None where they do not.

    Attributes:
        name: readable; a sweep's point is named after its sweep and what it varies.
        place: the folder under the output root, in text: what `matching` looks in.
        state: as in run.json, but interrupted where it says running and no process holds the folder.
        steps_done, steps_asked: None for a job that does not train.
        success_before, success_after: of the sampled policy on held-out tasks.
        reward: mean of the last step, or of the evaluation where nothing was trained.
    """

    name: str
    folder: Path
    place: str
    state: str
    job: str | None
    started_at: str
    steps_done: int | None
    steps_asked: int | None
    success_before: float | None
    success_after: float | None
    reward: float | None
    peak_bytes: int | None
    seconds: float | None
    record: dict[str, Any] = field(repr=False)

    @property
    def when(self) -> datetime | None:
        """In local time."""
        try:
            return datetime.fromisoformat(self.started_at).astimezone()
        except ValueError:
            return None


def run_folders(output: str | Path, with_superseded: bool = False) -> list[Path]:
    """Folders of single runs and of sweeps' points, newest first by their run.json.

    Args: with_superseded: also earlier attempts at a sweep's point, which lie in <name>_attemptN.
    """
    root = Path(output).expanduser().absolute()
    found = [file.parent for pattern in ("*/*/run.json", "sweeps/*/*/run.json") for file in root.glob(pattern)]
    kept = [folder for folder in found if with_superseded or not SUPERSEDED.search(folder.name)]
    return sorted(kept, key=_started_at, reverse=True)


def _started_at(folder: Path) -> str:
    return str(_record(folder).get("started_at") or "")


def read_run(folder: Path, output: str | Path) -> RecordedRun:
    """What the files of a run's folder say; a damaged file counts as absent."""
    record, summary = _record(folder), read_json(folder / "summary.json")
    first, last = ends_of_metrics(folder)
    evaluation = read_json(folder / "evaluation.json")
    trains = record.get("job") == "train"
    root = Path(output).expanduser().absolute()
    return RecordedRun(
        name=run_name(folder),
        folder=folder,
        place=str(folder.relative_to(root)) if folder.is_relative_to(root) else str(folder),
        state=_state(folder, record),
        job=record.get("job"),
        started_at=str(record.get("started_at") or ""),
        steps_done=_number(last.get("step")) or 0 if trains else None,
        steps_asked=_number(record.get("steps")) if trains else None,
        success_before=_score(evaluation, "before", "success") if evaluation else _number(first.get(SUCCESS)),
        success_after=_score(evaluation, "after", "success"),
        reward=_number(last.get("reward/mean")) if trains else _score(evaluation, "after", "reward"),
        peak_bytes=_peak_bytes(summary.get("peaks"), last),
        seconds=_number(record.get("seconds")) or _number(last.get("progress/seconds")),
        record=record,
    )


def _record(folder: Path) -> dict[str, Any]:
    return read_json(folder / "run.json")


def read_json(file: Path) -> dict[str, Any]:
    """What a file of a run holds; nothing where it is damaged, or not there."""
    try:
        return parsed(file.read_bytes())
    except OSError:
        return {}


def parsed(text: bytes) -> dict[str, Any]:
    """A JSON object; empty for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _peak_bytes(peaks: Any, last: dict[str, Any]) -> int | None:
    """Of all phases, or of the last step where no phase was summed up."""
    found = [peak for peak in peaks.values() if _number(peak)] if isinstance(peaks, dict) else []
    return max(found, default=_number(last.get("memory/peak_bytes")))


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float) else None


def _score(evaluation: dict[str, Any], when: str, score: str) -> float | None:
    found: Any = evaluation
    for key in (when, "sampled", score):
        found = found.get(key) if isinstance(found, dict) else None
    return _number(found)


def run_name(folder: Path) -> str:
    """The name a person reads."""
    record = _record(folder)
    own = folder.name.partition("_")[2] or folder.name  # behind the time, or behind a point's hash
    return f"{record['sweep']}/{own}" if record.get("sweep") else str(record.get("name") or own)


def _state(folder: Path, record: dict[str, Any]) -> str:
    state = str(record.get("state") or "unreadable")
    return "interrupted" if state == "running" and not is_held(folder) else state


def is_held(folder: Path) -> bool:
    """Whether a living process writes to a run's folder: it holds the folder's lock until it ends."""
    try:
        with (folder / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def ends_of_metrics(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first and the last complete line of metrics.jsonl; empty where there is none."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            first = file.readline()
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - LONGEST_LINE, 0))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}, {}
    return parsed(first), parsed(lines[-1]) if lines else {}


def find_run(output: str | Path, wanted: str | None) -> Path:
    """The folder of the run that is meant: the newest for None, else a folder, or a part of just one run's name.

    Raises: ConfigError when none or several fit.
    """
    if wanted and (Path(wanted).expanduser() / "run.json").is_file():
        return Path(wanted).expanduser().resolve()
    folders = run_folders(output)
    if not folders:
        raise ConfigError(f"{output}: no runs there. Start one: python -m mlxrl_runs, or look elsewhere: --output DIR")
    if wanted is None:
        return folders[0]
    places = {folder: f"{folder.parent.name}/{folder.name}" for folder in folders}
    names = {folder: run_name(folder) for folder in folders}
    fitting = [folder for folder, place in places.items() if wanted in place or wanted in names[folder]]
    if not fitting:
        near = difflib.get_close_matches(wanted, names.values(), n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"RUN: no run under {output} has {wanted!r} in its name.{hint} See: {LIST_COMMAND}")
    if len(fitting) > 1:
        listed = ", ".join(places[folder] for folder in fitting[:AMBIGUOUS_SHOWN])
        more = f" and {len(fitting) - AMBIGUOUS_SHOWN} more" if len(fitting) > AMBIGUOUS_SHOWN else ""
        raise ConfigError(f"RUN: {wanted!r} fits {len(fitting)} runs: {listed}{more}. Give more of the name.")
    return fitting[0]
