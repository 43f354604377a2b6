"""Draws one token per row, from a key of the row's own: what a row draws does not depend on who shares its batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxrl_runs.core.seeding import derive_seed


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits, > 0. The log-probabilities use it too, also those of greedy rows.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        min_p: keep tokens at least this share as likely as the likeliest; 0 keeps all.
        top_k: keep this many; 0 keeps all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0


@dataclass(frozen=True)
class Draw:
    """One step's tokens.

    Attributes:
        tokens: (B,) int32.
        logp: (B,) nats at the sampling temperature over the full vocabulary, whatever top-p, min-p and top-k left out.
        margin: (B,) by how much the chosen token's perturbed score beat the second best.
    """

    tokens: mx.array
    logp: mx.array
    margin: mx.array | None


def row_keys(parts: Sequence[tuple[object, ...]]) -> mx.array:
    """(B, 2) uint32: one random key per row, a function of its parts alone."""
    seeds = [derive_seed("draw", *part) for part in parts]
    return mx.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], dtype=mx.uint32)


def draw(
    logits: mx.array,
    keys: mx.array,
    position: int,
    sampling: Sampling,
    greedy: mx.array | None = None,
    with_margin: bool = False,
) -> Draw:
    """Draw from softmax(logits / temperature), cut down by top-k, top-p and min-p, by the Gumbel-max trick.

    Args:
        logits: (B, V).
        keys: (B, 2), see `row_keys`; `position` counts the tokens drawn from them so far.
        greedy: (B, 1) bool, rows that take the likeliest token instead of drawing; None for none of them.
    """
    scaled = logits.astype(mx.float32) / sampling.temperature
    scores = _kept(scaled, sampling)
    counter = keys + mx.array([0, position], dtype=mx.uint32)
    noise = mx.vmap(lambda key: mx.random.gumbel((logits.shape[-1],), key=key))(counter)
    scores = scores + noise if greedy is None else mx.where(greedy, scores, scores + noise)
    tokens = mx.argmax(scores, axis=-1)
    chosen = mx.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    margin = None
    if with_margin:
        best_two = mx.topk(scores, 2, axis=-1)
        margin = mx.abs(best_two[:, 0] - best_two[:, 1])
    return Draw(tokens, chosen - mx.logsumexp(scaled, axis=-1), margin)


def _kept(scaled: mx.array, sampling: Sampling) -> mx.array:
    """`scaled` with the tokens that are not to be drawn at -inf. The likeliest token always stays."""
    if sampling.top_k > 0 and sampling.top_k < scaled.shape[-1]:
        smallest = mx.min(mx.topk(scaled, sampling.top_k, axis=-1), axis=-1, keepdims=True)
        scaled = mx.where(scaled >= smallest, scaled, -mx.inf)
    if sampling.top_p < 1:
        # A token stays when the tokens likelier than it have not reached top_p yet.
        order = mx.argsort(-scaled, axis=-1)
        probability = mx.softmax(mx.take_along_axis(scaled, order, axis=-1), axis=-1)
        before = mx.cumsum(probability, axis=-1) - probability
        keep = mx.put_along_axis(mx.zeros(scaled.shape, dtype=mx.bool_), order, before < sampling.top_p, axis=-1)
        scaled = mx.where(keep, scaled, -mx.inf)
    if sampling.min_p > 0:
        floor = mx.max(scaled, axis=-1, keepdims=True) + mx.log(mx.array(sampling.min_p))
        scaled = mx.where(scaled >= floor, scaled, -mx.inf)
    return scaled
