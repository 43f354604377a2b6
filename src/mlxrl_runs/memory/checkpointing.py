"""Less memory under a gradient: some layers keep only their inputs, and compute what is inside them a second time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlxrl_runs.policy.shared_prompt import LayerCache

Weights = Any


@contextmanager
def checkpointed(model: nn.Module, every: int) -> Iterator[None]:
    """Inside, a gradient through `model` is the same and takes less memory and more time.

    Instances change their class and change it back: patching the class, as mlx-lm does, reaches every later model of
    the process.

    Args: every: 1 for all layers, k for the layers 0, k, 2k ..., 0 for none. The first of each k, not the last: the
        backward pass has let go of the others by the time it computes this one again.
    """
    chosen: list[nn.Module] = list(model.layers)[::every] if every else []
    kinds = [type(layer) for layer in chosen]
    for layer, kind in zip(chosen, kinds, strict=True):
        layer.__class__ = _forgetful(kind)
    try:
        yield
    finally:
        for layer, kind in zip(chosen, kinds, strict=True):
            layer.__class__ = kind


def _forgetful(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind`, keeping nothing but its inputs for the backward pass."""

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _call(layer, kind.__call__, args, kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__slots__": ()})


def _call(layer: nn.Module, plain: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`plain(layer, *args, **kwargs)`, to be called again when its gradient is wanted.

    Whatever a gradient flows through is an argument or a result of the function that is called again, weights and
    keys and values in caches included: through anything else the gradient would silently be 0.
    """
    given = [*args, *kwargs.values()]
    caches = [part for part in given if isinstance(part, LayerCache)]
    draws = mx.array(_random_state())  # dropout must leave out the same numbers the second time
    is_second = False

    def run(weights: Weights, inputs: Sequence[Any]) -> tuple[Any, list[Sequence[mx.array]]]:
        nonlocal is_second
        own, state = layer.trainable_parameters(), mx.array(_random_state())
        _random_state()[:] = draws
        layer.update(weights)
        filled = [_filled(part, arrays) for part, arrays in zip(given, inputs, strict=True)]
        output = plain(layer, *filled[: len(args)], **dict(zip(kwargs, filled[len(args) :], strict=True)))
        layer.update(own)  # else the layer would hold on to the graph
        if is_second:
            _random_state()[:] = state
        is_second = True
        return output, [part.left() for part in filled if isinstance(part, LayerCache)]

    output, left = mx.checkpoint(run)(layer.trainable_parameters(), [_arrays(part) for part in given])
    for cache, arrays in zip(caches, left, strict=True):
        cache.leave(arrays)
    return output


def _random_state() -> mx.array:
    """What MLX's global stream of draws is at: writing into this array moves it, assigning another one does not."""
    return cast(list[mx.array], mx.random.state)[0]


def _arrays(part: Any) -> Any:
    """Those in an argument; `mx.checkpoint` takes nothing else, the layer gets the rest as it is."""
    if isinstance(part, LayerCache):
        return part.read()
    return part if isinstance(part, mx.array) else ()


def _filled(part: Any, arrays: Any) -> Any:
    """The argument with other arrays in place of its own."""
    if isinstance(part, LayerCache):
        return part.reading(arrays)
    return arrays if isinstance(part, mx.array) else part
