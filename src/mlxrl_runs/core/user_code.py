"""Code of the user's own, by file and name. It runs with the user's rights: name only files you would run yourself."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxrl_runs.core.seeding import derive_seed
from mlxrl_runs.errors import ConfigError

PYTHON_OBJECT = "<python>"  # stands before the place where an object came from that was handed over as it was


def load_callable(file: str, name: str, *, file_key: str, name_key: str) -> Callable[..., Any]:
    """The callable `name` of a Python file.

    Args: file_key, name_key: full config keys, for messages.
    Raises: ConfigError when the file cannot be imported or has no such callable.
    """
    if file.startswith(PYTHON_OBJECT):
        raise ConfigError(
            f"{file_key}={file}: it was an object in Python, which no file brings back. Give it again: "
            "mlxrl_runs.train(..., env=..., reward=...)"
        )
    path = Path(file).expanduser().resolve()
    module_name = f"mlxrl_runs_user_{derive_seed(path):x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file_key}={file} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and typing look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{file_key}={file} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{name_key}={name}: {file_key}={file} has no callable of that name")
    return found


def check_file(file: str, key: str) -> None:
    """Raises: ValueError, in a schema's words, when there is no such file."""
    if not file.startswith(PYTHON_OBJECT) and not Path(file).expanduser().is_file():
        raise ValueError(f"{key}={file} is no file that can be read; give the path of a Python file")


def settled_file(file: str) -> str:
    """The same file from every folder: a run may be exported or evaluated from another one than it was started in."""
    path = Path(file).expanduser()
    return str(path.resolve()) if path.is_file() else file
