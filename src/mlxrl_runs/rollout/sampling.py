"""Draws one token per row, from a key of the row's own: what a row draws does not depend on who shares its batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlxrl_runs.core.seeding import derive_seed
from mlxrl_runs.maths import exponential

NEVER = -1e30  # a score that no noise lifts to the top; -inf would leave NaN where a whole block has it
SMALLEST_BLOCK = 8  # tokens


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits, > 0. The log-probabilities use it too, also those of greedy rows.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        min_p: keep tokens at least this share as likely as the likeliest; 0 keeps all.
        top_k: keep this many; 0 keeps all.
        token_bias: added to the logits of these token ids before anything is kept or drawn.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    token_bias: Mapping[int, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Draw:
    """One step's tokens.

    Attributes:
        tokens: (B,) int32.
        logp: (B,) nats at the sampling temperature over the full vocabulary, whatever bias, top-p, min-p and top-k did.
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
    positions: mx.array,
    sampling: Sampling,
    greedy: mx.array,
    with_margin: bool = False,
) -> Draw:
    """Draw from softmax(logits / temperature), changed by bias, top-k, top-p and min-p.

    The Gumbel-max trick, twice: first for a block of the vocabulary by its total probability, then for a token of that
    block. That is a draw from the same distribution with 2 sqrt(V) random numbers a row where one pass takes V.

    Args:
        logits: (B, V).
        keys: (B, 2), see `row_keys`; `positions` (B,) counts the tokens drawn from each of them so far.
        greedy: (B,) bool, rows that take the likeliest token instead of drawing.
    """
    scaled = logits.astype(mx.float32)
    if sampling.temperature != 1:
        scaled = scaled / sampling.temperature
    scores = _kept(_biased(scaled, sampling), sampling)
    blocks = _in_blocks(scores)
    count, size = blocks.shape[1:]
    masses = exponential.logsumexp(blocks)
    log_total = exponential.logsumexp(masses if scores is scaled else scaled)
    noise = _gumbel(keys, positions, count + size)
    best = mx.max(blocks, axis=-1)
    block_scores = mx.where(greedy[:, None], best, masses + noise[:, :count])
    block = mx.argmax(block_scores, axis=-1)
    row = mx.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    row_scores = mx.where(greedy[:, None], row, row + noise[:, count:])
    tokens = (block * size + mx.argmax(row_scores, axis=-1)).astype(mx.int32)
    chosen = mx.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    margin = mx.minimum(_lead(block_scores), _lead(row_scores)) if with_margin else None
    return Draw(tokens, chosen - log_total, margin)


def _in_blocks(scores: mx.array) -> mx.array:
    """(B, V) as (B, blocks, tokens of a block), filled up with tokens that are never drawn."""
    vocabulary = scores.shape[1]
    size = max(SMALLEST_BLOCK, 2 ** round(math.log2(vocabulary) / 2))
    count = -(-vocabulary // size)
    if count * size > vocabulary:
        scores = mx.pad(scores, [(0, 0), (0, count * size - vocabulary)], constant_values=NEVER)
    return scores.reshape(-1, count, size)


def _gumbel(keys: mx.array, positions: mx.array, count: int) -> mx.array:
    """(B, count) of the standard Gumbel distribution: -log(-log(u))."""
    counters = mx.stack([mx.zeros_like(positions), positions], axis=-1).astype(mx.uint32)
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(count,), key=key))(keys + counters)
    return -mx.log(-mx.log(uniform))


def _lead(scores: mx.array) -> mx.array:
    best_two = mx.topk(scores, 2, axis=-1)
    return mx.abs(best_two[:, 0] - best_two[:, 1])


def _biased(scaled: mx.array, sampling: Sampling) -> mx.array:
    if not sampling.token_bias:
        return scaled
    ids, biases = zip(*sampling.token_bias.items(), strict=True)
    bias = mx.maximum(mx.array(biases, dtype=mx.float32) / sampling.temperature, NEVER)
    return scaled.at[:, mx.array(ids)].add(bias)


def _kept(scaled: mx.array, sampling: Sampling) -> mx.array:
    """`scaled` with the tokens that are not to be drawn at NEVER. The likeliest token always stays."""
    if sampling.top_k > 0 and sampling.top_k < scaled.shape[-1]:
        smallest = mx.min(mx.topk(scaled, sampling.top_k, axis=-1), axis=-1, keepdims=True)
        scaled = mx.where(scaled >= smallest, scaled, NEVER)
    if sampling.top_p < 1:
        # A token stays when the tokens likelier than it have not reached top_p yet.
        order = mx.argsort(-scaled, axis=-1)
        probability = mx.softmax(mx.take_along_axis(scaled, order, axis=-1), axis=-1)
        before = mx.cumsum(probability, axis=-1) - probability
        keep = mx.put_along_axis(mx.zeros(scaled.shape, dtype=mx.bool_), order, before < sampling.top_p, axis=-1)
        scaled = mx.where(keep, scaled, NEVER)
    if sampling.min_p > 0:
        floor = mx.max(scaled, axis=-1, keepdims=True) + mx.log(mx.array(sampling.min_p))
        scaled = mx.where(scaled >= floor, scaled, NEVER)
    return scaled
