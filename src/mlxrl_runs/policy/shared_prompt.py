"""Hidden states of a batch whose rows begin with few distinct prompts: each prompt is computed once.

The G rows of a group read the same prompt. Its keys and values are computed once and repeated for the rows that begin
with it, so their gradients add up in the one forward pass that made them: the same gradient as one full pass a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlxrl_runs.core.batch import Batch


@dataclass(frozen=True)
class Prompts:
    """The distinct first contexts of a batch.

    Attributes:
        distinct: (N) prompts, as tokens.
        owner: for each of the B rows, the number of its prompt.
    """

    distinct: tuple[tuple[int, ...], ...]
    owner: tuple[int, ...]

    @classmethod
    def of(cls, batch: Batch) -> "Prompts":
        firsts = [trajectory.turns[0].context for trajectory in batch.trajectories]
        distinct = tuple(dict.fromkeys(firsts))
        number = {prompt: index for index, prompt in enumerate(distinct)}
        return cls(distinct, tuple(number[prompt] for prompt in firsts))

    @property
    def lengths(self) -> list[int]:
        """Of each row's prompt."""
        return [len(self.distinct[number]) for number in self.owner]

    @property
    def repeated_tokens(self) -> int:
        """Prompt tokens that one pass a row would compute again."""
        return sum(self.lengths) - sum(map(len, self.distinct))


def keeps_plain_kv(model: nn.Module) -> bool:
    """True when every layer looks back at all keys and values; sliding windows and recurrent states do not."""
    return all(type(cache) is KVCache for cache in make_prompt_cache(model))


def hidden_before(
    model: nn.Module, batch: Batch, prompts: Prompts, rows: mx.array, columns: mx.array, whole: bool = False
) -> mx.array:
    """(N, H): the hidden states that predict tokens[rows, columns], every one of them behind its row's prompt.

    Args:
        model: a stack of decoder layers that keep plain keys and values (`model.model` of mlx-lm's classes).
        whole: the last token of a row is read as well, for columns just behind its end.
    """
    layers = [_PromptCache() for _ in model.layers]
    read = model(padded(prompts.distinct), cache=layers)
    lengths = prompts.lengths
    end = None if whole else -1
    rest = [trajectory.tokens[length:end] for trajectory, length in zip(batch.trajectories, lengths, strict=True)]
    width = max(map(len, rest))
    owner = mx.array(prompts.owner)
    states = read[owner, mx.array(lengths) - 1][:, None]  # what predicts the first token behind the prompt
    if width > 0:
        view = _View(owner, mx.array(lengths, dtype=mx.int32), read.shape[1], width)
        written = model(padded(rest), cache=[_ContinuedCache(layer.left(), view) for layer in layers])
        states = mx.concatenate([states, written], axis=1)
    return states[rows, columns - mx.array(lengths)[rows]]


def padded(rows: Sequence[Sequence[int]]) -> mx.array:
    """(B, T) int32: each row's tokens, filled up on the right to the longest."""
    width = max(map(len, rows))
    return mx.array([[*row, *([0] * (width - len(row)))] for row in rows], dtype=mx.int32)


@runtime_checkable
class LayerCache(Protocol):
    """One layer's cache under a gradient: which arrays the layer reads from it, and which it leaves in it."""

    def read(self) -> Sequence[mx.array]:
        """The arrays that were there before the layer was called."""

    def reading(self, arrays: Sequence[mx.array]) -> "LayerCache":
        """A cache like this one was before the call, with these to be read."""

    def left(self) -> Sequence[mx.array]:
        """What the call left for others to read."""

    def leave(self, arrays: Sequence[mx.array]) -> None:
        """Take these as what the call left."""


class _PromptCache:
    """Keeps what the prompts' forward pass computed for one layer; speaks mlx-lm's cache protocol."""

    offset = 0

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> str:
        return "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        return keys, values

    def read(self) -> Sequence[mx.array]:
        return ()

    def reading(self, arrays: Sequence[mx.array]) -> "_PromptCache":
        return _PromptCache()

    def left(self) -> Sequence[mx.array]:
        assert self.keys is not None and self.values is not None, "the prompts come first"
        return self.keys, self.values

    def leave(self, arrays: Sequence[mx.array]) -> None:
        self.keys, self.values = arrays


class _View:
    """What all layers share when rows go on behind their prompts: where they are, and what they may look at."""

    def __init__(self, owner: mx.array, lengths: mx.array, prompt_width: int, width: int):
        self.owner = owner
        self.lengths = lengths
        before = mx.arange(prompt_width)[None] < lengths[:, None]  # (B, P)
        causal = mx.arange(width)[:, None] >= mx.arange(width)[None]  # (C, C)
        rows = len(lengths)
        self.mask = mx.concatenate(
            [
                mx.broadcast_to(before[:, None, None], (rows, 1, width, prompt_width)),
                mx.broadcast_to(causal[None, None], (rows, 1, width, width)),
            ],
            axis=-1,
        )


class _ContinuedCache:
    """One layer's prompt keys and values, repeated for the rows that go on behind them."""

    def __init__(self, prompt: Sequence[mx.array], view: _View):
        self._prompt = prompt
        self._view = view
        self.offset = view.lengths  # (B,): what rope adds to each row's positions

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self._view.mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        prompt_keys, prompt_values = self._prompt
        owner = self._view.owner
        return (
            mx.concatenate([prompt_keys[owner], keys], axis=2),
            mx.concatenate([prompt_values[owner], values], axis=2),
        )

    def read(self) -> Sequence[mx.array]:
        return self._prompt

    def reading(self, arrays: Sequence[mx.array]) -> "_ContinuedCache":
        return _ContinuedCache(arrays, self._view)

    def left(self) -> Sequence[mx.array]:
        return ()

    def leave(self, arrays: Sequence[mx.array]) -> None:
        """Nobody reads behind the rows."""
