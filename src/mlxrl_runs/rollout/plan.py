"""How an engine decodes on this machine: a few ways that give the same tokens, and the choice between them."""

import shutil
import sys
from dataclasses import dataclass
from enum import StrEnum

import mlx.core as mx
import mlx.nn as nn

from mlxrl_runs.rollout.blocks import DenseBlocks

COMPILER = "clang++" if sys.platform == "darwin" else "g++"  # what MLX's CPU backend makes its kernels with
LONG_RUN = 4_000  # decode steps from which a first compilation (some seconds) is earned back


class Way(StrEnum):
    """How one token a row is decoded.

    PLAIN: mlx-lm's own classes, the reference. COMPILED: the same, compiled as one function over rows with room to
    grow. FUSED: a dense model in fewer pieces, compiled as one function. SEGMENTS: the same pieces, compiled between
    one layer's attention and the next one's, with no mask where all rows are equally long.
    """

    PLAIN = "plain"
    COMPILED = "compiled"
    FUSED = "fused"
    SEGMENTS = "segments"


@dataclass(frozen=True)
class Plan:
    """Attributes: reason: for run.json. others: ways that a timing may find faster."""

    way: Way
    reason: str
    others: tuple[Way, ...] = ()


def read_every(max_completion_tokens: int) -> int:
    """Steps that are queued before the tokens of the oldest are read.

    On a CPU, where waiting costs nothing, 1. A GPU must not wait; but rows that ended stand still until they are seen,
    so short actions are looked at more often.
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        return 1
    return max(1, min(16, max_completion_tokens // 16))


def choose(model: nn.Module, compile_when: str, expected_steps: int | None, repeatable: bool = False) -> Plan:
    """The plan that config and shapes call for, without a clock: what a CPU uses, and where a GPU begins.

    Args:
        compile_when: rollout.compile, "auto", "always" or "never".
        expected_steps: decode steps the whole run may take; None where nobody can say.
        repeatable: the same bits every time. On a GPU the fused attention without a mask does not give them.
    """
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if compile_when == "never":
        return Plan(Way.PLAIN, "rollout.compile=never")
    if compile_when == "auto" and on_cpu:
        if shutil.which(COMPILER) is None:
            return Plan(Way.PLAIN, f"no {COMPILER} on this machine to compile with")
        if expected_steps is not None and expected_steps < LONG_RUN:
            return Plan(Way.PLAIN, f"{expected_steps} decode steps at most: too few to compile for")
    plain = (Way.PLAIN,) if compile_when == "auto" else ()
    if not DenseBlocks.supports(model):
        return Plan(Way.COMPILED, "no dense llama, qwen2 or qwen3: its own classes, compiled", plain)
    if not DenseBlocks.are_alike(model):
        return Plan(Way.FUSED, "a dense decoder whose layers are quantised in different ways", plain)
    if repeatable and not on_cpu:
        return Plan(Way.FUSED, "reproducible=true")
    first, second = (Way.FUSED, Way.SEGMENTS) if on_cpu else (Way.SEGMENTS, Way.FUSED)
    return Plan(first, "a dense decoder", (second, *plain))
