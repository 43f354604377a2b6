"""Algorithms, environments and rewards by name: one file and one yaml each, or an entry point of another package.

A file `algorithms/NAME.py` registers its class with `@algorithm("NAME")`; a third-party package names its class under
the entry point group `mlxrl_runs.algorithms` (or `.environments`, `.rewards`). Modules are imported when asked for.
"""

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from mlxrl_runs.core.settings import Settings
from mlxrl_runs.errors import ConfigError

Kind = TypeVar("Kind", bound=type[Settings])


class Registry:
    """Names of one kind of part.

    Args:
        kind: the config group (`algorithm`), used in messages.
        package: where the built-in files live; a file's name is the part's name.
        entry_point_group: where other packages announce theirs.
    """

    def __init__(self, kind: str, package: str, entry_point_group: str):
        self.kind = kind
        self._package = package
        self._entry_point_group = entry_point_group
        self._classes: dict[str, type[Settings]] = {}

    def __call__(self, name: str) -> Callable[[Kind], Kind]:
        """Decorator: register a class under `name`. The same name twice is an error."""

        def register(cls: Kind) -> Kind:
            known = self._classes.get(name)
            if known is not None and known.__module__ != cls.__module__:
                raise ConfigError(f"{self.kind} {name!r} is registered by {known.__module__} and by {cls.__module__}.")
            self._classes[name] = cls
            return cls

        return register

    def names(self) -> list[str]:
        """Every name that can be chosen, built in or announced by another package."""
        built_in = [module.name for module in pkgutil.iter_modules(importlib.import_module(self._package).__path__)]
        return sorted({*built_in, *self._entry_points(), *self._classes})

    def get(self, name: str) -> type[Settings]:
        """The class registered under `name`.

        Raises: KeyError when nobody has that name.
        """
        if name in self._classes:
            return self._classes[name]
        if name.isidentifier() and importlib.util.find_spec(f"{self._package}.{name}") is not None:
            importlib.import_module(f"{self._package}.{name}")
        elif name in self._entry_points():
            self._classes[name] = self._entry_points()[name].load()
        return self._classes[name]

    def _entry_points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._entry_point_group)}


algorithm = Registry("algorithm", "mlxrl_runs.algorithms", "mlxrl_runs.algorithms")
environment = Registry("env", "mlxrl_runs.envs", "mlxrl_runs.environments")
reward = Registry("reward", "mlxrl_runs.rewards", "mlxrl_runs.rewards")
