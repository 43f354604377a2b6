"""A learned value per token: advantages from it, and the loss that trains it."""

import mlx.core as mx

from mlxrl_runs.maths.returns import carried_back
from mlxrl_runs.maths.scalars import number


def gae(
    rewards: mx.array,
    values: mx.array,
    mask: mx.array,
    gamma: float,
    gae_lambda: float,
    bootstrap: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Generalized advantage estimation over action tokens, t' being the row's next action token after t:

        delta_t = r_t + gamma V_t' - V_t
        A_t = delta_t + gamma lambda A_t'

    Tokens the policy did not write are crossed without discount and without a delta; what stands on them is not read.

    Args:
        rewards: (B, T) in the reward's unit, usually 0 but on the last action token.
        values: (B, T) in the reward's unit; V_t judges what came before token t.
        mask: (B, T), nonzero on action tokens.
        gamma: discount per action token, 0 to 1.
        gae_lambda: 0 for one-step differences, 1 for returns minus values.
        bootstrap: (B,) value after the row's last action token: 0 where the episode ended by itself, the value of
            what comes next where it was cut off. None for all 0.
    Returns: (advantage, returns), each (B, T) in the reward's unit, returns = advantage + values; 0 off the mask.
    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 16; holes as in verl.
    """
    acted = mask != 0
    rewards, values = mx.where(acted, rewards, 0.0), mx.where(acted, values, 0.0)
    delta = mx.where(acted, rewards + gamma * _next_value(values, acted, bootstrap) - values, 0.0)
    advantage = mx.where(acted, carried_back(delta, mx.where(acted, gamma * gae_lambda, 1.0)), 0.0)
    return advantage, advantage + values


def _next_value(values: mx.array, acted: mx.array, bootstrap: mx.array | None) -> mx.array:
    """(B, T): the value at the next action token, `bootstrap` after the last. `values` are 0 off the mask."""
    after = mx.zeros((values.shape[0], 1)) if bootstrap is None else bootstrap[:, None]
    passed = mx.concatenate([mx.where(acted, 0.0, 1.0), mx.zeros_like(after)], axis=1)
    return carried_back(mx.concatenate([values, after], axis=1), passed)[:, 1:]


def clipped_value_loss(values: mx.array, old_values: mx.array, returns: mx.array, clip: float | None) -> mx.array:
    """Squared error of the value per token, to be minimised: max((V - R)^2, (clip(V, V_old +- c) - R)^2) / 2.

    Args:
        values: (B, T) in the reward's unit.
        old_values: (B, T), those at sampling time; a constant.
        returns: (B, T), as from `gae`; a constant.
        clip: c in the reward's unit, how far a value may move before moving closer stops paying; None for no limit.
    Returns: (B, T) in the reward's unit squared. Padding still holds values; multiply by the batch's weights.
    Source: Schulman et al.'s PPO in OpenAI baselines, as in verl.
    """
    error = mx.square(values - mx.stop_gradient(returns))
    if clip is None:
        return 0.5 * error
    # At a tie the slope is that of the second argument, as in the clipped surrogate.
    return 0.5 * mx.maximum(_clipped_error(values, old_values, returns, clip), error)


def value_clip_fraction(values: mx.array, old_values: mx.array, returns: mx.array, clip: float | None) -> mx.array:
    """Where the clip takes the value's gradient away: the clipped error is the larger.

    Args: as for `clipped_value_loss`.
    Returns: (B, T) of 0 and 1; weigh it like a loss to get a fraction.
    """
    if clip is None:
        return mx.zeros_like(values)
    larger = _clipped_error(values, old_values, returns, clip) > mx.square(values - returns)
    return larger.astype(mx.float32)


def _clipped_error(values: mx.array, old_values: mx.array, returns: mx.array, clip: float) -> mx.array:
    old = mx.stop_gradient(old_values)
    return mx.square(mx.clip(values, old - clip, old + clip) - mx.stop_gradient(returns))


def explained_variance(values: mx.array, returns: mx.array, mask: mx.array) -> float:
    """How much of the returns' variance the values account for: 1 - mean (R - V)^2 / var R, over the mask.

    Args: values, returns: (B, T) in the reward's unit; mask: (B, T), nonzero on action tokens.
    Returns: 1 for values that are the returns, 0 for a constant that is their mean, below 0 for worse; 0 where all
        returns are equal.
    """
    acted, tokens = mask != 0, mx.maximum((mask != 0).sum(), 1)
    mean = mx.where(acted, returns, 0.0).sum() / tokens
    variance = number(mx.where(acted, mx.square(returns - mean), 0.0).sum())
    error = number(mx.where(acted, mx.square(returns - values), 0.0).sum())
    return 1 - error / variance if variance > 1e-12 * number(tokens) else 0.0
