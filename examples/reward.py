"""A reward of your own: a function of one completion.

python examples/reward.py
python -m mlxrl_runs env=arithmetic reward=file reward.file.path=examples/reward.py
"""

import re

from mlxrl_runs import Completion, compose, train


def reward(completion: Completion) -> float:
    """1 for the right answer, less the further off it is, 0 for no number at all: a near miss earns something too."""
    numbers = re.findall(r"-?\d+", completion.text)
    if not numbers:
        return 0.0
    error = abs(int(numbers[-1]) - int(completion.answer or 0))
    return 1 / (1 + error)


if __name__ == "__main__":
    config = compose(["env=arithmetic", "steps=15", "trainer.evaluation_episodes=200", "tracking=jsonl"])
    run = train(config, reward=reward)
    before, after = (run.evaluation[when]["sampled"]["reward"] for when in ("before", "after"))
    print(f"reward on held-out problems: {before:.2f} before, {after:.2f} after")
