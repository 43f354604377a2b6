"""Says before the first step whether a group baseline will have anything to learn from."""

from collections.abc import Mapping

RARE = 0.2  # share of groups with both right and wrong answers under which a run is likely to stand still
# Spread of the rewards beyond that of right and wrong, with 1 for success: below it only the form pays (SmolLM2 on sums
# of three operands, .05: it learned to end in time and nothing else), above it steps on the way do (tiny's doors, .27).
FLAT = 0.1


def lack_of_signal(sampled: Mapping[str, float], group_size: int) -> str | None:
    """What to do about a policy whose groups will hardly ever disagree; None when they will.

    With success p, a group of G has right and wrong members with probability 1 - p^G - (1 - p)^G. Rewards that tell
    failures apart (a new room) give a signal as well; small ones (for the form) do not.
    Args: sampled: success, reward_std and episodes of the sampled evaluation.
    """
    success, spread = sampled["success"], sampled["reward_std"]
    share = 1 - success**group_size - (1 - success) ** group_size
    if share >= RARE or spread > FLAT + (success * (1 - success)) ** 0.5:
        return None
    if success > 0.5:
        return f"{success:.1%} of the sampled answers are right already: few groups disagree. Try harder tasks."
    return (
        f"Only {success:.1%} of the sampled answers are right: about {share:.0%} of the groups of {group_size} will "
        "disagree, and the others teach nothing. Try trainer.warm_start.steps=20, easier tasks, an answer prefix, or "
        f"group_size={2 * group_size}."
    )
