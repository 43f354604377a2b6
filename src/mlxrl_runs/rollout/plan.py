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
    """Attributes: read_every: steps that are queued before the tokens of the oldest are read; reason: for run.json."""

    way: Way
    read_every: int
    reason: str


def choose(model: nn.Module, compile_when: str, expected_steps: int | None, repeatable: bool = False) -> Plan:
    """The plan that config and shapes call for, without a clock: what a CPU uses, and where a GPU begins.

    Args:
        compile_when: rollout.compile, "auto", "always" or "never".
        expected_steps: decode steps the whole run may take; None where nobody can say.
        repeatable: the same bits every time. On a GPU the fused attention without a mask does not give them.
    """
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    read_every = 1 if on_cpu else 16
    if compile_when == "never":
        return Plan(Way.PLAIN, read_every, "rollout.compile=never")
    if compile_when == "auto" and on_cpu:
        if shutil.which(COMPILER) is None:
            return Plan(Way.PLAIN, read_every, f"no {COMPILER} on this machine to compile with")
        if expected_steps is not None and expected_steps < LONG_RUN:
            return Plan(Way.PLAIN, read_every, f"{expected_steps} decode steps at most: too few to compile for")
    if not DenseBlocks.supports(model):
        return Plan(Way.COMPILED, read_every, "no dense llama, qwen2 or qwen3: its own classes, compiled")
    if on_cpu:
        return Plan(Way.FUSED, read_every, "a dense decoder")
    return (
        Plan(Way.FUSED, read_every, "reproducible=true")
        if repeatable
        else Plan(Way.SEGMENTS, read_every, "a dense decoder")
    )
