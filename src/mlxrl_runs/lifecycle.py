"""How a run begins and ends on disk, whoever starts it: the worker of a command, or a notebook. Imports no MLX."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxrl_runs.config import RunConfig, config_hash
from mlxrl_runs.errors import MlxrlError
from mlxrl_runs.training.run_folder import RunFolder, start_record

FULL_DISK_BYTES = 128 * 1024  # what is left when a file no longer fits


def begin_folder(
    config: RunConfig, overrides: Sequence[str], sweep: Mapping[str, Any] | None
) -> tuple[RunFolder, Path | None]:
    """The run's folder with config.yaml and run.json in it.

    Args: sweep: {"name", "folder", "point"} where the run is a point of a sweep, whose folder is fixed.
    Returns: the folder, and where an earlier attempt at the point was moved to.
    """
    aside = None
    if sweep is None:
        folder = RunFolder.create(config.paths.output, config.run_name)
    else:
        folder, aside = RunFolder.create_at(sweep["folder"], config.paths.output)
    folder.write_text("config.yaml", _yaml(config.plain()))
    folder.write_json("run.json", start_record(config.plain(), config.run_name, overrides, config_hash(config), sweep))
    return folder, aside


def exit_code(failure: BaseException) -> int:
    """What a process that ended by this reports."""
    return failure.exit_code if isinstance(failure, MlxrlError) else 1


def one_line(failure: BaseException, folder: Path) -> str:
    """What run.json and the terminal say about it."""
    if isinstance(failure, MlxrlError):
        return str(failure)
    if isinstance(failure, SystemExit):
        return f"something in the run called exit({failure.code!r}), its environment perhaps"
    text = f"{type(failure).__name__}: {failure}"
    if shutil.disk_usage(folder).free < FULL_DISK_BYTES:
        return f"the disk is full ({text}). Free some space, or give another folder: paths.output=DIR"
    return text


def _yaml(plain: Mapping[str, Any]) -> str:
    import yaml  # type: ignore[import-untyped]

    return yaml.safe_dump(dict(plain), sort_keys=False, allow_unicode=True)
