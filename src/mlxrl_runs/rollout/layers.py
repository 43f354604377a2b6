"""What a model's layers keep between tokens, for rows of unequal lengths, behind mlx-lm's cache protocol.

Rows are aligned at position 0 and padded on the right, so a key's index is its token's position and nothing ever has to
be rolled or re-padded. What lies beyond a row's length is masked, and overwritten when the row grows. Everything is
arrays in, arrays out, so that one forward pass can be compiled.
"""

from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

Arrays = tuple[mx.array, ...]  # of one layer, rows first; empty before anything was read


class Keeps(Enum):
    """What a layer keeps."""

    KEYS_AND_VALUES = "keys and values of all tokens"
    STATES = "a state of fixed size"


def kept_by(model: nn.Module) -> tuple[Keeps, ...] | None:
    """For each layer; None for a model with a layer that keeps anything else.

    A sliding window keeps all keys and values too, and masks those it has left behind: a row that another one shares
    its batch with can then be continued at any length.
    """
    kinds: dict[type, Keeps] = {
        KVCache: Keeps.KEYS_AND_VALUES,
        RotatingKVCache: Keeps.KEYS_AND_VALUES,
        ArraysCache: Keeps.STATES,
    }
    found = [kinds.get(type(cache)) for cache in make_prompt_cache(model)]
    return None if None in found else tuple(kind for kind in found if kind is not None)


class Pass:
    """One forward pass over rows that hold different numbers of tokens. What all layers share is made once.

    Args:
        lengths: (B,) tokens each row holds before.
        width: tokens appended to every row; `widths` (B,) of them are real, the rest padding. None: all are.
        columns: how many columns of the keys there are to look at.
        start: the length of every row where all have the same one: then nothing needs a mask of its own.
    """

    def __init__(self, lengths: mx.array, width: int, widths: mx.array | None, columns: int, start: int | None = None):
        self.lengths = lengths
        self.width = width
        self.widths = widths
        self.columns = columns
        self.start = start
        self._masks: dict[int | None, mx.array] = {}
        self._places: dict[tuple[int, ...], mx.array] = {}

    @cached_property
    def positions(self) -> mx.array:
        """(B, width)"""
        return self.lengths[:, None] + mx.arange(self.width)

    def places(self, shape: tuple[int, ...]) -> mx.array:
        """Where the tokens being appended go, for keys or values of this (B, H, width, D) shape."""
        if shape not in self._places:
            self._places[shape] = mx.broadcast_to(self.positions[:, None, :, None], shape)
        return self._places[shape]

    def mask(self, window: int | None, as_array: bool = False) -> mx.array | str | None:
        """(B, 1, width, columns) True where a query may look; "causal" or None where that says it all.

        Args: as_array: not "causal", for models that compute attention themselves.
        """
        if self.start is not None and window is None:
            if self.width == 1:
                return None
            if self.start == 0 and not as_array:
                return "causal"
        if window not in self._masks:
            keys, queries = mx.arange(self.columns), self.positions[..., None]
            seen = keys <= queries
            if window is not None:
                seen = seen & (keys > queries - window)
            self._masks[window] = seen[:, None]
        return self._masks[window]


class KeysAndValues:
    """One attention layer in one pass: (B, H, capacity, D) twice."""

    def __init__(self, shared: Pass, arrays: Arrays, capacity: int):
        self._shared = shared
        self._capacity = capacity
        self.arrays = arrays

    @property
    def offset(self) -> mx.array | int:
        """What rope adds to each row's positions."""
        return self._shared.lengths if self._shared.start is None else self._shared.start

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        return self._shared.mask(window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        held = self.arrays or (self._room(keys), self._room(values))
        keys, values = self._written(held[0], keys), self._written(held[1], values)
        self.arrays = (keys, values)
        columns = self._shared.columns
        return keys[:, :, :columns], values[:, :, :columns]

    def _room(self, new: mx.array) -> mx.array:
        rows, heads, _, width = new.shape
        return mx.zeros((rows, heads, self._capacity, width), dtype=new.dtype)

    def _written(self, held: mx.array, new: mx.array) -> mx.array:
        start = self._shared.start
        if start is None:
            return mx.put_along_axis(held, self._shared.places(new.shape), new, axis=2)
        held[:, :, start : start + self._shared.width] = new
        return held


class States:
    """One recurrent layer in one pass. A row's padding leaves its states as they are."""

    def __init__(self, shared: Pass, arrays: Arrays):
        self._shared = shared
        self._arrays: dict[int, mx.array] = dict(enumerate(arrays))

    @property
    def arrays(self) -> Arrays:
        return tuple(self._arrays[number] for number in sorted(self._arrays))

    @property
    def lengths(self) -> mx.array | None:
        return self._shared.widths

    def __getitem__(self, number: int) -> mx.array | None:
        return self._arrays.get(number)

    def __setitem__(self, number: int, value: mx.array) -> None:
        self._arrays[number] = value

    def make_mask(self, length: int) -> mx.array | None:
        return None if self.lengths is None else mx.arange(length) < self.lengths[:, None]

    def advance(self, length: int) -> None:
        """Nothing to do: the next pass brings its own widths."""


def layers_in(shared: Pass, kinds: Sequence[Keeps], kept: Sequence[Arrays], capacity: int) -> list[Any]:
    """mlx-lm's view of what the rows keep, for one pass; read `arrays` of each afterwards."""
    return [
        KeysAndValues(shared, arrays, capacity) if kind is Keeps.KEYS_AND_VALUES else States(shared, arrays)
        for kind, arrays in zip(kinds, kept, strict=True)
    ]
