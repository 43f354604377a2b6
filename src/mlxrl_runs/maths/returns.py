"""What was earned from a point on: per step of an episode, and per token."""

from collections.abc import Sequence

import mlx.core as mx


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return to go within one episode: G_k = r_k + gamma G_(k+1), with G after the last step 0.

    Args:
        rewards: (K,), one a turn, in order.
        gamma: discount per turn, 0 to 1.
    Returns: (K,) in the reward's unit.
    Source: Sutton & Barto 2018, eq. 3.9.
    """
    returns: list[float] = []
    running = 0.0
    for reward in reversed(rewards):
        running = reward + gamma * running
        returns.append(running)
    return returns[::-1]


def token_returns(rewards: mx.array, mask: mx.array, gamma: float) -> mx.array:
    """Return to go per token: G_t = r_t + gamma G_(next action token), over action tokens only.

    Tokens the policy did not write are crossed without discount, and a reward that sits on one is not counted.

    Args:
        rewards: (B, T) in the reward's unit, usually 0 but on the last action token.
        mask: (B, T), nonzero on action tokens.
        gamma: discount per action token, 0 to 1.
    Returns: (B, T) in the reward's unit; 0 off the mask.
    Source: Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, as in verl.
    """
    acted = mask != 0
    running = mx.zeros(rewards.shape[0])
    columns: list[mx.array] = []
    for position in reversed(range(rewards.shape[1])):
        running = mx.where(acted[:, position], rewards[:, position] + gamma * running, running)
        columns.append(running)
    return mx.where(acted, mx.stack(columns[::-1], axis=1), 0.0)
