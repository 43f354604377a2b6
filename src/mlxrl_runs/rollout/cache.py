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
    _mask: mx.array | None = field(default=None, repr=False)

    @property
    def device(self) -> mx.array:
        return mx.array(self.host, dtype=mx.int32)

    def begin(self, width: int) -> None:
        """Prepare to append `width` columns to every row."""
        self._positions = self.device[:, None] + mx.arange(width)
        self._mask = (mx.arange(self.used(width)) <= self._positions[..., None])[:, None]

    def used(self, width: int) -> int:
        return max(self.host) + width

    @property
    def positions(self) -> mx.array:
        """(B, width) where the tokens being appended go."""
        assert self._positions is not None, "begin() comes first"
        return self._positions

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
        return self.lengths.positions[:, 0]

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self.lengths.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        used = self.lengths.used(keys.shape[2])
        self.keys = _written(_grown(self.keys, keys, used), keys, self.lengths.positions)
        self.values = _written(_grown(self.values, values, used), values, self.lengths.positions)
        return self.keys[:, :, :used], self.values[:, :, :used]


def _grown(held: mx.array | None, new: mx.array, used: int) -> mx.array:
    rows, heads, _, width = new.shape
    capacity = 0 if held is None else held.shape[2]
    if held is not None and used <= capacity:
        return held
    room = mx.zeros((rows, heads, used + (-used % GROWTH) - capacity, width), dtype=new.dtype)
    return room if held is None else mx.concatenate([held, room], axis=2)


def _written(held: mx.array, new: mx.array, positions: mx.array) -> mx.array:
    return mx.put_along_axis(held, mx.broadcast_to(positions[:, None, :, None], new.shape), new, axis=2)
