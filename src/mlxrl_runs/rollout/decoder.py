"""Two ways to feed tokens to a model with its KV kept: many rows at once, or one row with mlx-lm's own caches."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxrl_runs.policy.forward import last_logits
from mlxrl_runs.policy.shared_prompt import keeps_plain_kv
from mlxrl_runs.rollout.cache import RaggedKVCache, RowLengths


class Decoder(Protocol):
    """Holds the KV of some rows. Logits are those after each row's last token, (B, V)."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens fed to each row so far."""

    def feed(self, tokens: Sequence[Sequence[int]]) -> mx.array:
        """Append each row's tokens (at least one each)."""

    def step(self, tokens: mx.array, growing: Sequence[bool]) -> mx.array:
        """Append one token (B,) to every row; rows that do not grow read it and forget it."""

    def select(self, rows: Sequence[int]) -> "Decoder":
        """A decoder with copies of these rows, in this order."""

    def put_back(self, part: "Decoder", rows: Sequence[int]) -> None:
        """Take over `part`'s state for these rows: the reverse of `select`."""


class BatchedDecoder:
    """All rows in one forward pass. Needs a model whose layers all keep plain keys and values."""

    def __init__(self, model: nn.Module, rows: int):
        self._model = model
        self._lengths = RowLengths([0] * rows)
        self._caches = [RaggedKVCache(self._lengths) for _ in model.layers]

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths.host

    @staticmethod
    def supports(model: nn.Module) -> bool:
        return keeps_plain_kv(model)

    def feed(self, tokens: Sequence[Sequence[int]]) -> mx.array:
        width = max(len(row) for row in tokens)
        padded = mx.array([[*row, *([0] * (width - len(row)))] for row in tokens])
        self._lengths.begin(width)
        last = mx.array([len(row) - 1 for row in tokens])
        logits = last_logits(self._model, padded, last, self._caches)
        self._lengths.host = [length + len(row) for length, row in zip(self._lengths.host, tokens, strict=True)]
        return logits

    def step(self, tokens: mx.array, growing: Sequence[bool]) -> mx.array:
        self._lengths.begin(1)
        logits = self._model(tokens[:, None], cache=self._caches)[:, 0]
        self._lengths.host = [length + grows for length, grows in zip(self._lengths.host, growing, strict=True)]
        return logits

    def select(self, rows: Sequence[int]) -> "BatchedDecoder":
        part = BatchedDecoder(self._model, len(rows))
        part._lengths.host = [self._lengths.host[row] for row in rows]
        index = mx.array(list(rows))
        for mine, theirs in zip(self._caches, part._caches, strict=True):
            if mine.keys is not None and mine.values is not None:
                theirs.keys, theirs.values = mine.keys[index], mine.values[index]
        return part

    def put_back(self, part: Decoder, rows: Sequence[int]) -> None:
        assert isinstance(part, BatchedDecoder)
        index = mx.array(list(rows))
        for row, length in zip(rows, part._lengths.host, strict=True):
            self._lengths.host[row] = length
        for mine, theirs in zip(self._caches, part._caches, strict=True):
            mine.keys = _replace_rows(mine.keys, theirs.keys, index)
            mine.values = _replace_rows(mine.values, theirs.values, index)


def _replace_rows(held: mx.array | None, part: mx.array | None, index: mx.array) -> mx.array:
    assert held is not None and part is not None
    shortfall = part.shape[2] - held.shape[2]
    if shortfall > 0:
        held = mx.pad(held, [(0, 0), (0, 0), (0, shortfall), (0, 0)])
    held[index, :, : part.shape[2]] = part
    return held


class SingleDecoder:
    """One row, mlx-lm's own caches: the plain version, for every model family."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._caches = make_prompt_cache(model)
        self._length = 0

    @property
    def lengths(self) -> Sequence[int]:
        return [self._length]

    def feed(self, tokens: Sequence[Sequence[int]]) -> mx.array:
        [row] = tokens
        self._length += len(row)
        return last_logits(self._model, mx.array([list(row)]), mx.array([len(row) - 1]), self._caches)

    def step(self, tokens: mx.array, growing: Sequence[bool]) -> mx.array:
        self._length += 1
        return self._model(tokens[:, None], cache=self._caches)[:, -1]

    def select(self, rows: Sequence[int]) -> "SingleDecoder":
        assert list(rows) == [0], "one row is all there is"
        return self

    def put_back(self, part: Decoder, rows: Sequence[int]) -> None:
        assert part is self
