"""Reads contexts, then decodes one token of every row a step: several ways, the same tokens.

Everything a step changes is an argument and a result, so that it can be compiled, queued before the last one is done,
and looked at late: a row that ended stays as it was, whatever is queued behind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl_runs.policy.forward import last_logits
from mlxrl_runs.policy.shared_prompt import padded
from mlxrl_runs.rollout.blocks import DenseBlocks
from mlxrl_runs.rollout.layers import Arrays, Keeps, Pass, layers_in
from mlxrl_runs.rollout.plan import Way
from mlxrl_runs.rollout.rows import Rows
from mlxrl_runs.rollout.sampling import Draw, Sampling, draw

PASS_TOKENS = 8192  # rows times tokens of one prefill pass; longer contexts are read in several


@dataclass(frozen=True)
class Cursor:
    """Where each row of a batch is in its action, on the device.

    Attributes:
        tokens: (B,) sampled last and not read yet. lengths: (B,) tokens read before it.
        active: (B,) rows that still write. drawn: (B,) tokens of the action so far. limits: (B,) how many it may have.
        keys, greedy: see `draw`.
        longest: no row has read more tokens than that. is_level: all rows that write have read that many.
    """

    tokens: mx.array
    lengths: mx.array
    active: mx.array
    drawn: mx.array
    limits: mx.array
    keys: mx.array
    greedy: mx.array
    longest: int
    is_level: bool

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.tokens, self.lengths, self.active, self.drawn, self.limits, self.keys, self.greedy)


@dataclass(frozen=True)
class Written:
    """What a step wrote, (B,) each. Rows that had ended before it hold old tokens."""

    tokens: mx.array
    logp: mx.array
    margin: mx.array | None


class Stepper:
    """Reads and decodes rows of one model, with one way of sampling.

    Args:
        way: see `Way`. What is compiled is kept for as long as the stepper lives.
        eos_ids: tokens that end an action; empty to let none end it.
    """

    def __init__(
        self,
        model: nn.Module,
        kinds: tuple[Keeps, ...],
        way: Way,
        sampling: Sampling,
        eos_ids: frozenset[int],
        with_margin: bool = False,
    ):
        self._model = model
        self.kinds = kinds
        self.way = way
        self._sampling = sampling
        self._eos_ids = mx.array(sorted(eos_ids), dtype=mx.int32)
        self._with_margin = with_margin
        self._blocks: DenseBlocks | None = None
        self._weights: Any = None
        in_blocks = way in (Way.FUSED, Way.SEGMENTS)
        self._forward: Callable[..., Any] = self._blocks_forward if in_blocks else self._model_forward
        self._step = mx.compile(self._whole_step)
        if way is Way.SEGMENTS:
            self._first, self._between = mx.compile(self._first_segment), mx.compile(self._segment_between)
            self._last = mx.compile(self._last_segment)

    def begin(self) -> None:
        """Take the weights as they are now: the model learns between two rollouts."""
        if self.way in (Way.FUSED, Way.SEGMENTS):
            self._blocks = DenseBlocks(self._model, joins_mlp=self.way is Way.SEGMENTS)
            self._weights = self._blocks.weights()
            mx.eval(self._weights)
        elif self.way is Way.COMPILED:
            self._weights = self._model.parameters()

    def end(self) -> None:
        """Let the weights go."""
        self._blocks = self._weights = None

    def read(self, rows: Rows, contexts: Sequence[Sequence[int]]) -> mx.array:
        """Append each row's context, at least one token each: (B, V), the logits behind its last token."""
        longest = max(map(len, contexts))
        rows.make_room(max(rows.lengths) + longest)
        width = max(PASS_TOKENS // len(contexts), 1)
        logits: mx.array | None = None
        for start in range(0, longest, width):
            parts = [context[start : start + width] for context in contexts]
            part_logits = self._read_part(rows, parts, min(width, longest - start))
            ends_here = mx.array([start < len(context) <= start + width for context in contexts])
            logits = part_logits if logits is None else mx.where(ends_here[:, None], part_logits, logits)
            if longest > width:
                mx.eval(logits, rows.kept)
        assert logits is not None
        return logits

    def _read_part(self, rows: Rows, parts: Sequence[Sequence[int]], width: int) -> mx.array:
        widths = [len(part) for part in parts]
        is_level = len(set(rows.lengths)) == 1
        shared = Pass(
            mx.array(rows.lengths, dtype=mx.int32),
            width,
            None if min(widths) == width else mx.array(widths, dtype=mx.int32),
            columns=max(rows.lengths) + width,
            start=rows.lengths[0] if is_level else None,
        )
        layers = layers_in(shared, self.kinds, rows.kept, rows.capacity)
        logits = last_logits(self._model, padded(parts), mx.array([max(count - 1, 0) for count in widths]), layers)
        rows.kept = [layer.arrays for layer in layers]
        rows.lengths = [length + count for length, count in zip(rows.lengths, widths, strict=True)]
        return logits

    def draw(self, logits: mx.array, keys: mx.array, drawn: mx.array, greedy: mx.array) -> Draw:
        return draw(logits, keys, drawn, self._sampling, greedy, self._with_margin)

    def append(self, rows: Rows, tokens: Sequence[int]) -> mx.array:
        """Append one token to each row: (B, V), the logits behind it. What a step computes before it draws."""
        rows.make_room(max(rows.lengths) + 1)
        lengths, everyone = mx.array(rows.lengths, dtype=mx.int32), mx.array([True] * len(tokens))
        read = mx.array(list(tokens), dtype=mx.int32)
        logits, rows.kept = self._forward(self._weights, rows.kept, read, lengths, everyone, None)
        rows.lengths = [length + 1 for length in rows.lengths]
        return logits

    def step(self, rows: Rows, cursor: Cursor) -> tuple[Cursor, Written]:
        """Queue one step. `rows` then keeps what it read; their host lengths are left to the caller."""
        if self.way is Way.SEGMENTS and cursor.is_level:
            kept, changed, written = self._segmented_step(rows, cursor)
        elif self.way is Way.PLAIN:
            columns, start = min(cursor.longest + 1, rows.capacity), cursor.longest if cursor.is_level else None
            kept, changed, written = self._whole_step(None, rows.kept, cursor.arrays, None, columns, start)
        else:
            column = mx.array([cursor.longest]) if cursor.is_level else None
            kept, changed, written = self._step(self._weights, rows.kept, cursor.arrays, column)
        rows.kept = list(kept)
        mx.async_eval(rows.kept, changed, written)
        tokens, lengths, active, drawn = changed
        following = replace(
            cursor, tokens=tokens, lengths=lengths, active=active, drawn=drawn, longest=cursor.longest + 1
        )
        return following, Written(*written, *([] if self._with_margin else [None]))

    # ---- what is compiled: arrays in, arrays out

    def _whole_step(
        self, weights: Any, kept: Sequence[Arrays], cursor: tuple[mx.array, ...], column: Any, *where: int | None
    ) -> tuple[list[Arrays], list[mx.array], list[mx.array]]:
        tokens, lengths, active = cursor[:3]
        logits, grown = self._forward(weights, kept, tokens, lengths, active, column, *where)
        return grown, *self._advance(logits, cursor)

    def _blocks_forward(
        self,
        weights: Any,
        kept: Sequence[Arrays],
        tokens: mx.array,
        lengths: mx.array,
        active: mx.array,
        column: mx.array | None,
    ) -> tuple[mx.array, list[Arrays]]:
        assert self._blocks is not None
        return self._blocks.step(tokens, lengths, kept, weights, column)

    def _model_forward(
        self,
        weights: Any,
        kept: Sequence[Arrays],
        tokens: mx.array,
        lengths: mx.array,
        active: mx.array,
        _column: mx.array | None,
        columns: int | None = None,
        start: int | None = None,
    ) -> tuple[mx.array, list[Arrays]]:
        """Args: columns, start: see `Pass`; None in what is compiled, since each number would make another function."""
        kinds = zip(self.kinds, kept, strict=True)
        capacity = max((arrays[0].shape[2] for kind, arrays in kinds if kind is Keeps.KEYS_AND_VALUES), default=0)
        writes = active.astype(mx.int32) if Keeps.STATES in self.kinds else None
        layers = layers_in(Pass(lengths, 1, writes, columns or capacity, start), self.kinds, kept, capacity)
        live = None if weights is None else self._model.parameters()
        try:
            if weights is not None:
                self._model.update(weights)
            logits = self._model(tokens[:, None], cache=layers)[:, 0]
        finally:
            if live is not None:
                self._model.update(live)
        return logits, [layer.arrays for layer in layers]

    def _advance(self, logits: mx.array, cursor: tuple[mx.array, ...]) -> tuple[list[mx.array], list[mx.array]]:
        """Draw, and move on the rows that write."""
        tokens, lengths, active, drawn, limits, keys, greedy = cursor
        new = self.draw(logits, keys, drawn, greedy)
        tokens = mx.where(active, new.tokens, tokens)
        lengths, drawn = lengths + active, drawn + active
        active = active & (drawn < limits)
        if self._eos_ids.size:
            active = active & ~mx.any(tokens[:, None] == self._eos_ids, axis=-1)
        written = [tokens, new.logp] + ([] if new.margin is None else [new.margin])
        return [tokens, lengths, active, drawn], written

    # ---- a step in segments: attention itself stays outside, where it may look at more columns each time

    def _segmented_step(self, rows: Rows, cursor: Cursor) -> Any:
        assert self._blocks is not None
        weights, start, layers = self._weights, cursor.longest, self._blocks.layers
        grown: list[Arrays] = []
        state = self._first(weights["embedding"], weights["layers"][0], cursor.tokens, cursor.lengths)
        for number, (keys, values) in enumerate(rows.kept):
            x, query, key, value = state
            keys[:, :, start : start + 1], values[:, :, start : start + 1] = key, value
            grown.append((keys, values))
            attended = mx.fast.scaled_dot_product_attention(
                query, keys[:, :, : start + 1], values[:, :, : start + 1], scale=layers[number].attention.scale
            )
            here = weights["layers"][number]
            if number + 1 < len(layers):
                state = self._between(here, weights["layers"][number + 1], x, attended, cursor.lengths)
            else:
                ends = {name: weights[name] for name in ("embedding", "norm", "head")}
                changed, written = self._last(here, ends, x, attended, cursor.arrays)
        return grown, changed, written

    def _first_segment(self, embedding: Any, weights: Any, tokens: mx.array, lengths: mx.array) -> Any:
        assert self._blocks is not None
        x = self._blocks.embedded(tokens, {"embedding": embedding})
        return x, *self._blocks.layers[0].queries_keys_values(x, weights, lengths)

    def _segment_between(self, here: Any, following: Any, x: mx.array, attended: mx.array, lengths: mx.array) -> Any:
        assert self._blocks is not None
        layer = self._blocks.layers[0]  # the layers differ by their weights alone
        x = layer.rest(x, attended, here)
        return x, *layer.queries_keys_values(x, following, lengths)

    def _last_segment(self, here: Any, ends: Any, x: mx.array, attended: mx.array, cursor: Any) -> Any:
        assert self._blocks is not None
        x = self._blocks.layers[0].rest(x, attended, here)
        return self._advance(self._blocks.logits(x, ends), cursor)
