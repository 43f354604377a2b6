"""A KV cache whose rows have lengths of their own, for batches of unequal prompts and unequal turns.

Rows are aligned at position 0 and padded on the right, so a key's index is its token's position and nothing ever has to
be rolled or re-padded. What lies beyond a row's length is masked, and overwritten when the row grows.
"""

from dataclasses import dataclass, field

import mlx.core as mx

GROWTH = 64  # capacity is rounded up to this many tokens, so that it rarely changes


@dataclass
class RowLengths:
    """How many tokens each row holds; shared by the caches of all layers."""

    host: list[int]
    _positions: mx.array | None = field(default=None, repr=False)
    _offset: mx.array | None = field(default=None, repr=False)
    _mask: mx.array | None = field(default=None, repr=False)
    _places: dict[tuple[int, ...], mx.array] = field(default_factory=dict, repr=False)

    def begin(self, width: int) -> None:
        """Prepare to append `width` columns to every row; what all layers share is made here, once."""
        self._offset = mx.array(self.host, dtype=mx.int32)
        self._positions = self._offset[:, None] + mx.arange(width)
        self._places = {}
        self._mask = (mx.arange(self.used(width)) <= self._positions[..., None])[:, None]

    def used(self, width: int) -> int:
        return max(self.host) + width

    @property
    def offset(self) -> mx.array:
        """(B,) where each row's first token being appended goes."""
        assert self._offset is not None, "begin() comes first"
        return self._offset

    def places(self, shape: tuple[int, ...]) -> mx.array:
        """Where the tokens being appended go, for keys or values of this (B, H, width, D) shape."""
        assert self._positions is not None, "begin() comes first"
        if shape not in self._places:
            self._places[shape] = mx.broadcast_to(self._positions[:, None, :, None], shape)
        return self._places[shape]

    @property
    def mask(self) -> mx.array:
        """(B, 1, width, used) True where a query may look."""
        assert self._mask is not None, "begin() comes first"
        return self._mask


class RaggedKVCache:
    """Keys and values of one layer, (B, H, capacity, D); speaks mlx-lm's cache protocol."""

    def __init__(self, lengths: RowLengths):
        self.lengths = lengths
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """(B,) what rope adds to each row's positions."""
        return self.lengths.offset

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self.lengths.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        used = self.lengths.used(keys.shape[2])
        keys_at, values_at = self.lengths.places(keys.shape), self.lengths.places(values.shape)
        self.keys = mx.put_along_axis(_grown(self.keys, keys, used), keys_at, keys, axis=2)
        self.values = mx.put_along_axis(_grown(self.values, values, used), values_at, values, axis=2)
        return self.keys[:, :, :used], self.values[:, :, :used]


def _grown(held: mx.array | None, new: mx.array, used: int) -> mx.array:
    rows, heads, _, width = new.shape
    capacity = 0 if held is None else held.shape[2]
    if held is not None and used <= capacity:
        return held
    room = mx.zeros((rows, heads, used + (-used % GROWTH) - capacity, width), dtype=new.dtype)
    return room if held is None else mx.concatenate([held, room], axis=2)
