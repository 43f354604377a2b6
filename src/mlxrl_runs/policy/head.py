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
FOUND = 3  # numbers per position that `head_statistics` gives
CHUNK_BYTES = 8 * 2**20  # of float32 logits computed at once; about eight arrays of their size are alive with them


def apply_head(model: nn.Module, hidden: mx.array) -> mx.array:
    """(..., V): logits of a SPLITTABLE model."""
    return model.model.embed_tokens.as_linear(hidden) if model.args.tie_word_embeddings else model.lm_head(hidden)


def head_statistics(
    model: nn.Module,
    hidden: mx.array,
    labels: mx.array,
    temperature: float | mx.array,
    entropy_gradient: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    """(log-probability of each label, nats; entropy, nats; whether the label is the likeliest token), each (N,).

    A frozen head is applied a chunk of positions at a time, and d logp / d hidden (N, H) is kept instead of anything
    V wide: the gradient then is that, times what comes from above. A trainable head takes the plain way.

    Args:
        hidden: (N, H) of a SPLITTABLE model, behind its last norm.
        temperature: no unit, or (N,).
        entropy_gradient: the entropy carries a gradient too; d H / d hidden is kept as well then.
    """
    module = model.model.embed_tokens if model.args.tie_word_embeddings else model.lm_head
    apply = lambda states: apply_head(model, states)
    if tree_flatten(module.trainable_parameters()):
        found = maths.logprob.statistics(apply(hidden), labels, temperature)
        entropy = found.entropy if entropy_gradient else mx.stop_gradient(found.entropy)
        return found.logp, entropy, found.is_likeliest
    width = CHUNK_BYTES // (4 * model.args.vocab_size) or 1
    parts: list[tuple[mx.array, ...]] = []
    for start in range(0, hidden.shape[0], width):
        place = slice(start, start + width)
        states = hidden[place]
        if parts:  # one chunk after the other; else all of them are computed, and kept, side by side
            done = parts[-1] if model.training else parts[-1][:FOUND]  # only a gradient reads the directions
            [states] = mx.depends([states], [*done])
        heat = temperature[place] if isinstance(temperature, mx.array) else temperature
        parts.append(_frozen(apply, labels[place], heat, entropy_gradient)(states))
    logp, entropy, is_likeliest = (mx.concatenate([part[index] for part in parts]) for index in range(FOUND))
    return logp, entropy, is_likeliest


def _frozen(
    apply: Callable[[mx.array], mx.array], labels: mx.array, temperature: float | mx.array, entropy_gradient: bool
) -> Callable[[mx.array], tuple[mx.array, ...]]:
    """hidden -> (logp, entropy, is_likeliest, d logp / d hidden[, d entropy / d hidden]), the last as its gradients."""

    @mx.custom_function
    def function(hidden: mx.array) -> tuple[mx.array, ...]:
        logits = apply(hidden)
        found = maths.logprob.statistics(logits, labels, temperature, maths.exponential.exp)
        slopes = [found.slope, found.entropy_slope] if entropy_gradient else [found.slope]
        # where no gradient is asked for, nothing asks for the directions either
        directions = [mx.vjp(apply, [hidden], [slope.astype(logits.dtype)])[1][0] for slope in slopes]
        return found.logp, found.entropy, found.is_likeliest, *directions

    @function.vjp
    def vjp(primals: mx.array, cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]) -> mx.array:
        gradient = sum(
            (above[:, None] * direction for above, direction in zip(cotangents, outputs[FOUND:], strict=False)),
            mx.array(0.0),
        )
        return gradient.astype(primals.dtype)

    return cast(Callable[[mx.array], tuple[mx.array, ...]], function)
