"""A user's own environment: a file and the name of a factory in it."""

import importlib.util
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, model_validator

from mlxrl_runs.core import registry
from mlxrl_runs.core.protocols import Environment
from mlxrl_runs.core.seeding import derive_seed
from mlxrl_runs.core.settings import PositiveInt, Recommended, Settings
from mlxrl_runs.errors import ConfigError


@registry.environment("python")
class PythonFile(Settings):
    """Environments made by `factory(task, seed, group_index)` of a Python file.

    Tasks are the numbers 0 .. tasks - 1 as text; the last `held_out` of them are only evaluated. The file is run by
    this process with the user's rights: name only files you would run yourself.

    Attributes:
        file: path of the Python file.
        factory: name of the callable in it.
    """

    name: Literal["python"]
    file: Annotated[str, Field(min_length=1)]
    factory: Annotated[str, Field(min_length=1)]
    tasks: PositiveInt
    held_out: PositiveInt
    recommended: Recommended
    _make: Callable[[str, int, int], Environment] | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _exists(self) -> "PythonFile":
        if not os.path.isfile(Path(self.file).expanduser()):
            raise ValueError(f"file={self.file} is no file that can be read; give the path of a Python file")
        if self.held_out >= self.tasks:
            raise ValueError(f"held_out={self.held_out} leaves no task to train on; tasks={self.tasks}")
        return self

    def sample_task(self, generator: random.Random) -> str:
        return str(generator.randrange(self.tasks - self.held_out))

    def held_out_tasks(self) -> Sequence[str]:
        return [str(number) for number in range(self.tasks - self.held_out, self.tasks)]

    def make(self, task: str, seed: int, group_index: int) -> Environment:
        if self._make is None:
            self._make = self._load()
        return self._make(task, seed, group_index)

    def _load(self) -> Callable[[str, int, int], Environment]:
        path = Path(self.file).expanduser().resolve()
        name = f"mlxrl_runs_user_{derive_seed(path):x}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"env.file={self.file} is no Python file: its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and typing look their module up there
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ConfigError(f"env.file={self.file} cannot be imported: {type(error).__name__}: {error}") from error
        if not callable(getattr(module, self.factory, None)):
            raise ConfigError(f"env.factory={self.factory}: env.file={self.file} has no callable of that name")
        return getattr(module, self.factory)
