"""exp() and what is made of it, fast where MLX's own is slow.

On x86 CPUs MLX computes exp one number at a time: 12-17 ns each, when a multiplication takes half a nanosecond. There a
polynomial stands in for it, of operations that the compiler turns into vector instructions (2-3 ns); everywhere else it
is MLX's own. `scripts/bench_rollout.py --cases exp` measures both.
"""

import math
import platform

import mlx.core as mx

X86 = ("x86_64", "amd64")
LOWEST = -87.0  # exp of less is no normal float32 number
LN2_FRONT = 0.693359375  # ln 2 in nine bits: its multiples are exact, so nothing is lost in the difference
ROUNDER = 12582912.0  # 1.5 * 2**23: adding it and taking it away again rounds a float32 to a whole number


def is_slow() -> bool:
    """Whether MLX's exp works one number at a time here."""
    return mx.default_device().type == mx.DeviceType.cpu and platform.machine().lower() in X86


def exp(x: mx.array) -> mx.array:
    """e**x of numbers <= 80, float32, without a gradient; e**-87 for anything below -87.

        e**x = 2**n * e**f,    n = round(x / ln 2),    |f| <= ln 2 / 2

    with 2**n written into the exponent's bits and e**f by its Taylor polynomial of degree 6: off by 3e-7 of the value.
    """
    return _exp(x) if is_slow() else mx.exp(x)


def _exp(x: mx.array) -> mx.array:
    x = mx.maximum(x.astype(mx.float32), LOWEST)
    halvings = (x * (1 / math.log(2)) + ROUNDER) - ROUNDER
    rest = (x - halvings * LN2_FRONT) - halvings * (math.log(2) - LN2_FRONT)
    value = rest * (1 / 720) + 1 / 120
    for coefficient in (1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        value = value * rest + coefficient
    return value * ((halvings + 127).astype(mx.int32) << 23).view(mx.float32)


def logsumexp(x: mx.array) -> mx.array:
    """log sum exp over the last axis, without a gradient."""
    if not is_slow():
        return mx.logsumexp(x, axis=-1)
    highest = mx.max(x, axis=-1, keepdims=True)
    return highest[..., 0] + mx.log(mx.sum(_exp(x - highest), axis=-1))


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x), without a gradient."""
    return (x / (1 + _exp(mx.minimum(-x, -LOWEST)))).astype(x.dtype) if is_slow() else x * mx.sigmoid(x)
