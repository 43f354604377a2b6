"""Finds runs and what lies in them. Light imports only."""

from dataclasses import dataclass
from pathlib import Path

from mlxrl_runs.errors import ConfigError

WEIGHTS = ("adapters", "model")  # of a finished run: an adapter, or everything after full training
LIST_COMMAND = "python -m mlxrl_runs ls"


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
