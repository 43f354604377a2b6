"""From logits to log-probabilities and entropy, at the temperature the tokens were sampled with."""

from collections.abc import Callable

import mlx.core as mx


def logp_entropy_and_slope(
    logits: mx.array, labels: mx.array, temperature: float = 1.0, exp: Callable[[mx.array], mx.array] = mx.exp
) -> tuple[mx.array, mx.array, mx.array]:
    """Log-probability of the given tokens, entropy of the distribution they were drawn from, d logp / d logits.

        logp = z[label] - log sum exp z,    H = log sum exp z - sum p z,    slope = (one_hot(label) - p) / temperature

    with z = logits / temperature, p = softmax(z). One exp() serves all three: it is what costs most (16 ns an element
    on a CPU). What is not used is not computed.

    Args:
        logits: (..., V), already aligned: logits[b, t] speaks of labels[b, t]. Computed in float32. A logit of -inf
            has probability 0 and adds nothing.
        labels: (...) token ids.
        temperature: > 0, no unit; the sampler's own, for policy, old and reference alike.
        exp: `exponential.exp` where no gradient is taken through it.
    Returns: (...) nats, (...) nats, (..., V).
    """
    scaled = _scaled(logits, temperature)
    shifted = scaled - mx.stop_gradient(scaled.max(axis=-1, keepdims=True))
    weights = exp(shifted)
    total = weights.sum(axis=-1, keepdims=True)
    log_total = mx.log(total).squeeze(-1)
    logp = mx.take_along_axis(shifted, labels[..., None], axis=-1).squeeze(-1) - log_total
    finite = mx.maximum(shifted, -1e4)  # p is 0 down there anyway, and 0 * -inf would be NaN
    entropy = log_total - (weights * finite).sum(axis=-1) / total.squeeze(-1)
    chosen = mx.take_along_axis(weights, labels[..., None], axis=-1) / total
    slope = mx.put_along_axis(-weights / total, labels[..., None], 1 - chosen, axis=-1) / temperature
    return logp, entropy, slope


def logp_and_entropy(logits: mx.array, labels: mx.array, temperature: float = 1.0) -> tuple[mx.array, mx.array]:
    """The first two of `logp_entropy_and_slope`."""
    return logp_entropy_and_slope(logits, labels, temperature)[:2]


def token_logp(logits: mx.array, labels: mx.array, temperature: float = 1.0) -> mx.array:
    """The first of `logp_entropy_and_slope`: (...) nats."""
    return logp_and_entropy(logits, labels, temperature)[0]


def entropy(logits: mx.array, temperature: float = 1.0) -> mx.array:
    """The second of `logp_entropy_and_slope`: (...) nats, 0 to log V."""
    return logp_and_entropy(logits, mx.zeros(logits.shape[:-1], dtype=mx.int32), temperature)[1]


def _scaled(logits: mx.array, temperature: float) -> mx.array:
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}: greedy decoding has no log-probabilities.")
    logits = logits.astype(mx.float32)
    return logits if temperature == 1 else logits / temperature
