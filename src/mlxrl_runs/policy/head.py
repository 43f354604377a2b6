"""From hidden states to log-probabilities, keeping nothing as wide as the vocabulary where that can be helped."""

from collections.abc import Callable
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen2, qwen3

from mlxrl_runs import maths

# Classes whose hidden states and head can be taken apart, so that prompt and observation positions never meet the head.
SPLITTABLE = (qwen2.Model, qwen3.Model, llama.Model)
CHUNK_BYTES = 8 * 2**20  # of float32 logits computed at once; about eight arrays of their size are alive with them


def apply_head(model: nn.Module, hidden: mx.array) -> mx.array:
    """(..., V): logits of a SPLITTABLE model."""
    return model.model.embed_tokens.as_linear(hidden) if model.args.tie_word_embeddings else model.lm_head(hidden)


def head_logp(model: nn.Module, hidden: mx.array, labels: mx.array, temperature: float) -> tuple[mx.array, mx.array]:
    """Log-probability of each label and entropy, nats, both (N,). The entropy carries no gradient.

    A frozen head is applied a chunk of positions at a time, and d logp / d hidden (N, H) is kept instead of anything
    V wide: the gradient then is that, times what comes from above. A trainable head takes the plain way.

    Args: hidden: (N, H) of a SPLITTABLE model, behind its last norm.
    """
    module = model.model.embed_tokens if model.args.tie_word_embeddings else model.lm_head
    apply = lambda states: apply_head(model, states)
    if tree_flatten(module.trainable_parameters()):
        logp, entropy = maths.logprob.logp_and_entropy(apply(hidden), labels, temperature)
        return logp, mx.stop_gradient(entropy)
    width = CHUNK_BYTES // (4 * model.args.vocab_size) or 1
    parts: list[tuple[mx.array, mx.array, mx.array]] = []
    for start in range(0, hidden.shape[0], width):
        states = hidden[start : start + width]
        if parts:  # one chunk after the other; else all of them are computed, and kept, side by side
            done = parts[-1] if model.training else parts[-1][:2]  # only a gradient reads the direction
            [states] = mx.depends([states], [*done])
        parts.append(_frozen(apply, labels[start : start + width], temperature)(states))
    return mx.concatenate([part[0] for part in parts]), mx.concatenate([part[1] for part in parts])


def _frozen(
    apply: Callable[[mx.array], mx.array], labels: mx.array, temperature: float
) -> Callable[[mx.array], tuple[mx.array, mx.array, mx.array]]:
    """hidden -> (logp, entropy, d logp / d hidden), with the last as its gradient."""

    @mx.custom_function
    def function(hidden: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        logits = apply(hidden)
        logp, entropy, slope = maths.logprob.logp_entropy_and_slope(logits, labels, temperature, maths.exponential.exp)
        _, [direction] = mx.vjp(apply, [hidden], [slope.astype(logits.dtype)])
        return logp, entropy, direction  # where no gradient is asked for, nothing asks for the direction either

    @function.vjp
    def vjp(primals: mx.array, cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]) -> mx.array:
        return (cotangents[0][:, None] * outputs[2]).astype(primals.dtype)

    return cast(Callable[[mx.array], tuple[mx.array, mx.array, mx.array]], function)
