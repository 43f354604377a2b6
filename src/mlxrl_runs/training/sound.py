"""Finds numbers that must not reach the weights, and weights that they have reached."""

import math
from collections.abc import Iterable, Mapping

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrl_runs.core.trajectory import Trajectory
from mlxrl_runs.errors import TrainingError
from mlxrl_runs.policy.load import Policy

# The norm of a gradient is a float32 sum of squares, which end at 3.4e38; it may be some 1000 times the advantages.
LARGEST_ADVANTAGE = 1e15
PROBE_TOKENS = 8  # any tokens will do: weights that break a forward pass break every one


def require_usable_advantages(metrics: Mapping[str, float], returns: Iterable[float], step: int) -> None:
    """Look at advantage/min and advantage/max before a gradient is made of them.

    Args: returns: total rewards of the batch's episodes, for the message.
    Raises: TrainingError when one is not finite, or so large that a gradient would not be.
    """
    low, high = metrics["advantage/min"], metrics["advantage/max"]
    if max(abs(low), abs(high)) <= LARGEST_ADVANTAGE:  # false for NaN
        return
    earned = list(returns)
    raise TrainingError(
        f"The advantages of step {step} reach from {low:.3g} to {high:.3g}; allowed: finite, up to "
        f"{LARGEST_ADVANTAGE:g} either way, or the gradient overflows. The episodes earned {min(earned):.3g} to "
        f"{max(earned):.3g}. Pay less (a smaller weight of the reward's parts, such as reward.environment.weight=1e-6) "
        "or have advantages divided by their spread: algorithm=grpo algorithm.advantage_scaling=group."
    )


def require_finite_draws(trajectories: Iterable[Trajectory], when: str) -> None:
    """Look at what the tokens were drawn with.

    Raises: TrainingError when a log-probability is not finite: whatever was sampled then is no policy's.
    """
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns, 1):
            if not math.isfinite(sum(turn.sampler_logp)):
                raise TrainingError(
                    f"The policy's log-probabilities are not finite {when} (task {trajectory.task!r}, turn {number}): "
                    "its weights are broken, most likely by updates that were too large. Lower "
                    "optimizer.learning_rate, or take an earlier checkpoint."
                )


def fault_of(policy: Policy) -> str | None:
    """What is not finite about a policy, in words: its weights, or what they compute. None for a sound one."""
    for name, array in tree_flatten(policy.model.trainable_parameters()):
        if not mx.isfinite(array).all().item():
            return f"the weight {name} is not finite"
    logits = policy.model(mx.arange(PROBE_TOKENS)[None])
    return None if mx.isfinite(logits).all().item() else "its log-probabilities are not finite"
