"""Padded arrays made from trajectories: one row each, padding on the right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxrl_runs.core.trajectory import Group, Trajectory
from mlxrl_runs.maths.scalars import table


@dataclass(frozen=True)
class Batch:
    """B trajectories padded to T tokens.

    Every (B, T) array is aligned with `tokens`: `x[b, t]` speaks of `tokens[b, t]`, whose log-probability is
    conditioned on `tokens[b, :t]`. Column 0 is always context.

    Attributes:
        tokens: (B, T) int32.
        lengths: (B,) int32, tokens that are not padding. Padding is known by length, never by token id.
        action_mask: (B, T) bool, True where the policy sampled the token (the sampled EOS included).
        observation_mask: (B, T) bool, True where the environment answered an action.
        turn_index: (B, T) int32, the turn an action token belongs to, -1 elsewhere.
        sampler_logp: (B, T) nats, as sampled; 0 elsewhere.
        group_index: (B,) which task's group a row belongs to; grouping follows this id, never the position.
        trajectories: the rows' source.
        step: the training step, from 1; schedules read it.
        kl_coef: what an adaptive KL coefficient stands at; None where it does not adapt.
        old_logp, reference_logp: (B, T) nats, present when something asked for that pass.
        values: (B, T) reward expected from an action token on, before any update on this batch.
        final_values: (B,) the same of the place behind the last token.
        advantage, returns: (B, T), set by the algorithm's `credit`.
        trained_mask: (B, T) bool, the action tokens that are trained: some may be left out.
        weights: (B, T), the reduction: a loss is `(per_token * weights).sum()`.
        observation_weights: (B, T), the same for what the environment wrote.
    """

    tokens: mx.array
    lengths: mx.array
    action_mask: mx.array
    observation_mask: mx.array
    turn_index: mx.array
    sampler_logp: mx.array
    group_index: tuple[int, ...]
    trajectories: tuple[Trajectory, ...]
    step: int = 1
    kl_coef: float | None = None
    old_logp: mx.array | None = None
    reference_logp: mx.array | None = None
    values: mx.array | None = None
    final_values: mx.array | None = None
    advantage: mx.array | None = None
    returns: mx.array | None = None
    trained_mask: mx.array | None = None
    weights: mx.array | None = None
    observation_weights: mx.array | None = None

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    def with_(self, **changes: object) -> "Batch":
        return replace(self, **changes)  # type: ignore[arg-type]

    def select_rows(self, rows: Sequence[int]) -> "Batch":
        """These rows, with the columns that only padded them cut off."""
        trajectories = tuple(self.trajectories[row] for row in rows)
        width = max(len(trajectory.tokens) for trajectory in trajectories)
        neighbours = range(rows[0], rows[-1] + 1)  # as a slice they cost no copy
        picked = slice(rows[0], rows[-1] + 1) if list(rows) == list(neighbours) else mx.array(list(rows))
        arrays = {name: getattr(self, name) for name in (*_PER_TOKEN, *_PER_ROW)}
        part = {name: array[picked] for name, array in arrays.items() if array is not None}
        return replace(
            self,
            group_index=tuple(self.group_index[row] for row in rows),
            trajectories=trajectories,
            **{name: array[:, :width] if name in _PER_TOKEN else array for name, array in part.items()},
        )

    def chunks(self, rows: int) -> Iterator["Batch"]:
        """The batch in micro-batches of `rows` rows; 0 gives it whole."""
        size = rows or self.rows
        for start in range(0, self.rows, size):
            yield self.select_rows(range(start, min(start + size, self.rows)))

    def spread_turns(self, per_turn: Sequence[Sequence[float]]) -> mx.array:
        """(B, T): each action token gets its turn's number, everything else 0.

        Args: per_turn: for each row one number per turn.
        """
        turns = max(len(row) for row in per_turn)
        table = mx.array([[*row, *([0.0] * (turns - len(row)))] for row in per_turn], dtype=mx.float32)
        spread = mx.take_along_axis(table, mx.maximum(self.turn_index, 0), axis=1)
        return mx.where(self.action_mask, spread, 0.0)

    def spread_rows(self, per_row: Sequence[float]) -> mx.array:
        """(B, T): each action token gets its row's number, everything else 0."""
        return mx.where(self.action_mask, mx.array(list(per_row), dtype=mx.float32)[:, None], 0.0)

    def at_turn_ends(self, per_turn: Sequence[Sequence[float]]) -> mx.array:
        """(B, T): each turn's number on the last token of its action, everything else 0. Args: as `spread_turns`."""
        nothing = mx.full((self.rows, 1), -1)
        following = mx.concatenate([self.turn_index[:, 1:], nothing], axis=1)
        return mx.where(self.turn_index != following, self.spread_turns(per_turn), 0.0)

    def turn_sums(self, values: mx.array) -> list[list[float]]:
        """For each row and turn the sum over its action tokens. Args: values: (B, T)."""
        return [
            [sum(row[start:end]) for start, end in trajectory.action_spans()]
            for row, trajectory in zip(table(values), self.trajectories, strict=True)
        ]


_PER_TOKEN = (
    "tokens", "action_mask", "observation_mask", "turn_index", "sampler_logp", "old_logp", "reference_logp", "values",
    "advantage", "returns", "trained_mask", "weights", "observation_weights",
)  # fmt: skip
_PER_ROW = ("lengths", "final_values")


def collate(groups: Sequence[Group]) -> Batch:
    """Pad the groups' trajectories into one Batch, rows in group order."""
    rows = [(index, trajectory) for index, group in enumerate(groups) for trajectory in group.trajectories]
    width = max(len(trajectory.tokens) for _, trajectory in rows)
    tokens, turn_index, sampler_logp, observed = [], [], [], []
    for _, trajectory in rows:
        ids = trajectory.tokens
        turn_row, logp_row, observed_row = [-1] * width, [0.0] * width, [False] * width
        for turn_number, (turn, (start, end)) in enumerate(
            zip(trajectory.turns, trajectory.action_spans(), strict=True)
        ):
            turn_row[start:end] = [turn_number] * (end - start)
            logp_row[start:end] = turn.sampler_logp
        for start, end in trajectory.answer_spans():
            observed_row[start:end] = [True] * (end - start)
        tokens.append(ids + [0] * (width - len(ids)))
        turn_index.append(turn_row)
        sampler_logp.append(logp_row)
        observed.append(observed_row)
    turn_array = mx.array(turn_index, dtype=mx.int32)
    return Batch(
        tokens=mx.array(tokens, dtype=mx.int32),
        lengths=mx.array([len(trajectory.tokens) for _, trajectory in rows], dtype=mx.int32),
        action_mask=turn_array >= 0,
        observation_mask=mx.array(observed),
        turn_index=turn_array,
        sampler_logp=mx.array(sampler_logp, dtype=mx.float32),
        group_index=tuple(index for index, _ in rows),
        trajectories=tuple(trajectory for _, trajectory in rows),
    )
