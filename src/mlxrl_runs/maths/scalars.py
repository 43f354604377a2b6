"""From arrays to Python numbers and back, with types that say which."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx


def number(array: mx.array) -> float:
    """The one number in an array. Waits for it to be computed."""
    return cast(float, array.item())


def numbers(array: mx.array) -> list[float]:
    """(N,) as a list."""
    return cast(list[float], array.tolist())


def integers(array: mx.array) -> list[int]:
    """(N,) of an integer type as a list."""
    return cast(list[int], array.tolist())


def table(array: mx.array) -> list[list[float]]:
    """(N, M) as a list of rows."""
    return cast(list[list[float]], array.tolist())


def switches(values: Sequence[bool]) -> mx.array:
    """(N,) of bool."""
    return mx.array(list(values), dtype=mx.bool_)
