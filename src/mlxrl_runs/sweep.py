"""Many runs: every point is checked before the first starts, then Hydra's sweeper and launcher run them."""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrl_runs.config import (
    CONFIG_NAME,
    Point,
    RunConfig,
    as_typed,
    compose_config,
    config_hash,
    expand_points,
    own_hydra,
    shown_override,
    validate,
)
from mlxrl_runs.errors import ConfigError, MlxrlError
from mlxrl_runs.supervise import Outcome, read_objective, supervise
from mlxrl_runs.training.run_folder import make_sweep_folder, read_run_json, safe_name, write_json

if TYPE_CHECKING:
    from omegaconf import DictConfig

SWEEP_FILE = "sweep.json"
NAMES_SHOWN = 3


class RunFailed(MlxrlError):
    """One run of a sweep failed; the others go on."""


class SweepStopped(BaseException):
    """A signal ended a run, so the sweep ends too. No Exception: launchers catch those and start the next run."""

    def __init__(self, signal_number: int):
        self.signal_number = signal_number
        super().__init__(f"stopped by signal {signal_number}")


@dataclass(frozen=True)
class Line:
    """A point's line in the report after a sweep."""

    state: str
    folder: Path
    label: str
    objective: float | None
    error: str | None


def run_sweep(overrides: Sequence[str], config_dirs: Sequence[str]) -> int:
    """Run every point and report. Returns: 0 when all finished, 1 when one failed, 128 + signal when stopped.

    Raises: ConfigError, before anything starts, listing what is wrong at which point.
    """
    overrides = as_typed(overrides, many=True)  # Hydra's own sweeper reads them too
    points = expand_points(overrides, config_dirs)
    hydras = [override for override in overrides if override.lstrip("+~").startswith(("hydra.", "hydra/"))]
    configs = _check_points(points, hydras, config_dirs)
    folder = make_sweep_folder(configs[0].paths.output, configs[0].name or f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}")
    write_json(folder / SWEEP_FILE, _sweep_record(folder, overrides, points, configs))
    stopped_by, trouble = 0, None
    with own_hydra(config_dirs) as hydra:
        try:
            hydra.multirun(CONFIG_NAME, _job, [*overrides, f"hydra.sweep.dir={_quoted(folder)}"])
        except SweepStopped as stop:
            stopped_by = stop.signal_number
        except Exception as error:  # the sweeper passes on the first failure once all points have run
            trouble = error
    lines = _lines(folder)
    _print_report(folder, lines, trouble)
    if stopped_by:
        return 128 + stopped_by
    return 1 if trouble or any(line.state != "finished" for line in lines) else 0


def _check_points(points: Sequence[Point], hydras: Sequence[str], config_dirs: Sequence[str]) -> list[RunConfig]:
    configs: list[RunConfig] = []
    problems: dict[str, list[str]] = {}
    for point in points:
        try:
            configs.append(_run_of(validate(compose_config([*hydras, *point.overrides], config_dirs))))
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(_label(point.swept))
    if problems:
        raise ConfigError([f"{_at(labels, len(points))}{problem}" for problem, labels in problems.items()])
    return configs


def _run_of(config: RunConfig) -> RunConfig:
    if config.job == "doctor":
        raise ConfigError("job: doctor looks at this machine once and is no run. Leave -m out.")
    return config


def _at(labels: Sequence[str], points: int) -> str:
    """Where a problem was found."""
    if len(labels) == points > 1:
        return "every point: "
    more = f" and {len(labels) - NAMES_SHOWN} more" if len(labels) > NAMES_SHOWN else ""
    shown = "; ".join(label for label in labels[:NAMES_SHOWN] if label)
    return f"{shown}{more}: " if shown else ""


def _label(swept: Iterable[str]) -> str:
    return " ".join(map(shown_override, swept))


def _sweep_record(
    folder: Path, overrides: Sequence[str], points: Sequence[Point], configs: Sequence[RunConfig]
) -> dict[str, Any]:
    listed = [
        {
            "overrides": list(point.overrides),
            "label": _label(point.swept) or config.run_name,
            "folder": str(_point_folder(folder, point.swept, config)),
        }
        for point, config in zip(points, configs, strict=True)
        if point.is_final
    ]
    return {"name": folder.name, "overrides": list(overrides), "points": listed}


def _point_folder(folder: Path, swept: Sequence[str], config: RunConfig) -> Path:
    """The same for the same point at every attempt: a short hash, and what a person wants to read."""
    digest = hashlib.sha256("\n".join([*sorted(swept), config_hash(config)]).encode()).hexdigest()[:8]
    return folder / f"{digest}_{safe_name(','.join(swept) or config.run_name)}"


def _quoted(folder: Path) -> str:
    """A path as Hydra's override grammar reads it back unchanged."""
    text = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def _job(composed: "DictConfig") -> float | None:
    """One point, called by Hydra's launcher, in another process perhaps.

    Returns: the objective, for sweepers that search; None when the run measured none.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    overrides = list(HydraConfig.get().overrides.task)
    folder = Path(HydraConfig.get().sweep.dir)
    plain: Any = OmegaConf.to_container(composed, resolve=True)
    config = validate(plain)
    listed = json.loads((folder / SWEEP_FILE).read_text())
    points = [point for point in listed["points"] if point["overrides"] == overrides]
    label = points[0]["label"] if points else _label(overrides)
    place = points[0]["folder"] if points else str(_point_folder(folder, overrides, config))
    number = f"{listed['points'].index(points[0]) + 1}/{len(listed['points'])} " if points else ""
    print(f"--- {number}{label}", flush=True)
    outcome = supervise(config.plain(), overrides, {"name": listed["name"], "folder": place, "point": label})
    return _value(outcome, label)


def _value(outcome: Outcome, label: str) -> float | None:
    if outcome.stopped_by is not None:
        raise SweepStopped(outcome.stopped_by)
    if outcome.folder is None:
        raise RunFailed(f"{label}: did not start (exit code {outcome.exit_code}); the reason stands above")
    if outcome.exit_code != 0:
        raise RunFailed(f"{label}: {outcome.record.get('error') or f'exit code {outcome.exit_code}'}")
    return outcome.objective


def _lines(folder: Path) -> list[Line]:
    """What became of every point: the planned ones first, then those a searching sweeper added."""
    planned = {
        Path(point["folder"]): point["label"] for point in json.loads((folder / SWEEP_FILE).read_text())["points"]
    }
    found = {path.parent for path in folder.glob("*/run.json") if not re.search(r"_attempt\d+$", path.parent.name)}
    places = planned or {path: path.name for path in sorted(found)}
    return [_line(place, label) for place, label in places.items()]


def _line(place: Path, label: str) -> Line:
    record = read_run_json(place)
    return Line(record.get("state", "not started"), place, label, read_objective(place), record.get("error"))


def _print_report(folder: Path, lines: Sequence[Line], trouble: Exception | None) -> None:
    print(f"\nSweep {folder.name}: {sum(line.state == 'finished' for line in lines)} of {len(lines)} runs finished")
    for line in lines:
        objective = "-" if line.objective is None else f"{line.objective:.3f}"
        print(f"  {line.state:<11} success {objective:>6}  {line.label}  {line.folder}")
    failed = [line for line in lines if line.error]
    for line in failed:
        print(f"{line.label}: {line.state}: {line.error}\n  see {line.folder / 'run.log'}", file=sys.stderr)
    if isinstance(trouble, RunFailed) and not failed:
        print(trouble, file=sys.stderr)
    elif trouble is not None and not failed:
        print(f"The sweep failed: {type(trouble).__name__}: {trouble}", file=sys.stderr)
        print("For a traceback: HYDRA_FULL_ERROR=1 and the same command.", file=sys.stderr)
