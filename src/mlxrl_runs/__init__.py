"""Reinforcement learning of language models on MLX, run as experiments.

`compose`, `train` and `evaluate` do in Python what `python -m mlxrl_runs` does in a terminal. Everything a reward, an
environment or an algorithm of your own needs is here too.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxrl_runs.api import FinishedRun as FinishedRun
    from mlxrl_runs.api import compose as compose
    from mlxrl_runs.api import evaluate as evaluate
    from mlxrl_runs.api import train as train
    from mlxrl_runs.config import RunConfig as RunConfig
    from mlxrl_runs.core.protocols import Algorithm as Algorithm
    from mlxrl_runs.core.protocols import Completion as Completion
    from mlxrl_runs.core.protocols import Environment as Environment
    from mlxrl_runs.core.protocols import StepResult as StepResult
    from mlxrl_runs.core.registry import algorithm as register_algorithm
    from mlxrl_runs.errors import ConfigError as ConfigError
    from mlxrl_runs.errors import MlxrlError as MlxrlError

_HOMES = {
    "FinishedRun": "api",
    "compose": "api",
    "evaluate": "api",
    "train": "api",
    "RunConfig": "config",
    "Algorithm": "core.protocols",
    "Completion": "core.protocols",
    "Environment": "core.protocols",
    "StepResult": "core.protocols",
    "register_algorithm": "core.registry",
    "ConfigError": "errors",
    "MlxrlError": "errors",
}
__all__ = [
    "Algorithm",
    "Completion",
    "ConfigError",
    "Environment",
    "FinishedRun",
    "MlxrlError",
    "RunConfig",
    "StepResult",
    "compose",
    "evaluate",
    "register_algorithm",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for, and nothing before: the command's help must come at once."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    return getattr(module, name.removeprefix("register_") if name.startswith("register_") else name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
