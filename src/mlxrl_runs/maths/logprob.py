"""From logits to log-probabilities and entropy, at the temperature the tokens were sampled with."""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx


class Statistics(NamedTuple):
    """About one token and the distribution it was drawn from, z = logits / temperature and p = softmax(z).

    Attributes:
        logp: (...) nats, z[label] - log sum exp z.
        entropy: (...) nats, H = log sum exp z - sum p z.
        is_likeliest: (...) bool, no other token has a larger logit.
        slope: (..., V) d logp / d logits = (one_hot(label) - p) / temperature.
        entropy_slope: (..., V) d H / d logits = -p (log p + H) / temperature.
    """

    logp: mx.array
    entropy: mx.array
    is_likeliest: mx.array
    slope: mx.array
    entropy_slope: mx.array


def statistics(
    logits: mx.array,
    labels: mx.array,
    temperature: float | mx.array = 1.0,
    exp: Callable[[mx.array], mx.array] = mx.exp,
) -> Statistics:
    """Log-probability of the given tokens, and what else one exp() over the logits tells: that is what costs most.

    What is not used is not computed.
    Args:
        logits: (..., V), already aligned: logits[b, t] speaks of labels[b, t]. Computed in float32. A logit of -inf
            has probability 0 and adds nothing.
        labels: (...) token ids.
        temperature: > 0, no unit, or (...); the sampler's own, for policy, old and reference alike.
        exp: `exponential.exp` where no gradient is taken through it.
    """
    scaled = _scaled(logits, temperature)
    shifted = scaled - mx.stop_gradient(scaled.max(axis=-1, keepdims=True))
    weights = exp(shifted)
    total = weights.sum(axis=-1, keepdims=True)
    log_total = mx.log(total).squeeze(-1)
    chosen = mx.take_along_axis(shifted, labels[..., None], axis=-1).squeeze(-1)
    finite = mx.maximum(shifted, -1e4)  # p is 0 down there anyway, and 0 * -inf would be NaN
    entropy = log_total - (weights * finite).sum(axis=-1) / total.squeeze(-1)
    share = weights / total
    chosen_share = mx.take_along_axis(share, labels[..., None], axis=-1)
    width = temperature[..., None] if isinstance(temperature, mx.array) else temperature
    return Statistics(
        logp=chosen - log_total,
        entropy=entropy,
        is_likeliest=chosen == 0,
        slope=mx.put_along_axis(-share, labels[..., None], 1 - chosen_share, axis=-1) / width,
        entropy_slope=-share * (finite - log_total[..., None] + entropy[..., None]) / width,
    )


def logp_and_entropy(logits: mx.array, labels: mx.array, temperature: float = 1.0) -> tuple[mx.array, mx.array]:
    """The first two of `statistics`."""
    return statistics(logits, labels, temperature)[:2]


def token_logp(logits: mx.array, labels: mx.array, temperature: float = 1.0) -> mx.array:
    """The first of `statistics`: (...) nats."""
    return logp_and_entropy(logits, labels, temperature)[0]


def entropy(logits: mx.array, temperature: float = 1.0) -> mx.array:
    """The second of `statistics`: (...) nats, 0 to log V."""
    return logp_and_entropy(logits, mx.zeros(logits.shape[:-1], dtype=mx.int32), temperature)[1]


def _scaled(logits: mx.array, temperature: float | mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    if isinstance(temperature, mx.array):
        return logits / temperature[..., None]
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}: greedy decoding has no log-probabilities.")
    return logits if temperature == 1 else logits / temperature
