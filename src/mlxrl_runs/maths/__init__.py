"""The formulas: arrays or plain numbers in, the same out. No model, config, logging or randomness.

Numbers per episode or per step (`baselines`, `anchors`, `shaping`, `returns.discounted_returns`) are few and are Python
floats, so that equal rewards stay exactly equal; numbers per token are MLX arrays. A submodule is imported when it is
first used: `from mlxrl_runs import maths` alone does not load MLX.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxrl_runs.maths import (
        anchors,
        baselines,
        divergence,
        exponential,
        logprob,
        mismatch,
        objective,
        reduction,
        returns,
        scalars,
        shaping,
        surrogates,
        values,
    )

__all__ = [
    "anchors",
    "baselines",
    "divergence",
    "exponential",
    "logprob",
    "mismatch",
    "objective",
    "reduction",
    "returns",
    "scalars",
    "shaping",
    "surrogates",
    "values",
]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
