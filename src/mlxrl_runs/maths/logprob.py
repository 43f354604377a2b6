"""From logits to log-probabilities and entropy, at the temperature the tokens were sampled with."""

import mlx.core as mx


def token_logp(logits: mx.array, labels: mx.array, temperature: float = 1.0) -> mx.array:
    """Log-probability of the given tokens: z[label] - logsumexp(z), z = logits / temperature.

    No (B, T, V) log-softmax is made or kept for the backward pass.

    Args:
        logits: (B, T, V), already aligned: logits[b, t] speaks of labels[b, t]. Computed in float32.
        labels: (B, T) token ids.
        temperature: > 0, no unit; the sampler's own, for policy, old and reference alike.
    Returns: (B, T) nats.
    """
    scaled = _scaled(logits, temperature)
    chosen = mx.take_along_axis(scaled, labels[..., None], axis=-1).squeeze(-1)
    return chosen - mx.logsumexp(scaled, axis=-1)


def entropy(logits: mx.array, temperature: float = 1.0) -> mx.array:
    """Entropy of the next-token distribution: logsumexp(z) - sum of p z, p = softmax(z), z = logits / temperature.

    Args:
        logits: (B, T, V); a logit of -inf has probability 0 and adds nothing.
        temperature: > 0, no unit.
    Returns: (B, T) nats, 0 to log V.
    """
    scaled = _scaled(logits, temperature)
    shifted = scaled - mx.stop_gradient(scaled.max(axis=-1, keepdims=True))
    shifted = mx.maximum(shifted, -1e4)  # p is 0 down there anyway, and 0 * -inf would be NaN
    return mx.logsumexp(shifted, axis=-1) - (mx.softmax(shifted, axis=-1) * shifted).sum(axis=-1)


def _scaled(logits: mx.array, temperature: float) -> mx.array:
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}: greedy decoding has no log-probabilities.")
    logits = logits.astype(mx.float32)
    return logits if temperature == 1 else logits / temperature
