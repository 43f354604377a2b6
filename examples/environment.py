"""An environment of your own: several turns, states that come back, tasks that are held out.

python examples/environment.py
python -m mlxrl_runs env=python env.file=examples/environment.py env.factory=Corridor
"""

import random

from mlxrl_runs import StepResult, compose, train

AHEAD, BEHIND = ("red", "blue", "green", "cyan"), ("gold", "black", "white", "pink")


class Corridor:
    """Nine rooms in a row. A door's colour tells whether the exit lies ahead (push) or behind (pull)."""

    max_turns = 6

    def __init__(self, task: str, seed: int, group_index: int):
        self.task = task
        stream = random.Random(int(task))
        self.place, self.exit = 4, stream.choice((0, 1, 2, 3, 5, 6, 7, 8))
        self.signs = [stream.choice(AHEAD if room < self.exit else BEHIND) for room in range(9)]

    def reset(self) -> str:
        return f"door {self.signs[self.place]}"

    def step(self, action: str) -> StepResult:
        move = {"<action>push</action>": 1, "<action>pull</action>": -1}.get(action.strip(), 0)
        self.place = min(max(self.place + move, 0), 8)
        out = self.place == self.exit
        reward = 1.0 if out else -0.1
        return StepResult(f"door {self.signs[self.place]}", reward, done=out, info={"success": float(out)})

    def state_id(self, observation: str) -> str:
        # Equal keys within a task mean the same decision. Two rooms may look alike, so the room itself is the key: one
        # that is entered again is an anchor, and gigpo compares what was done there.
        return f"{self.task}@{self.place}"


if __name__ == "__main__":
    config = compose(["steps=15", "trainer.evaluation_episodes=64", "tracking=jsonl"])
    run = train(config, env=Corridor)
    before, after = (run.evaluation[when]["sampled"]["success"] for when in ("before", "after"))
    print(f"success in corridors it never saw: {before:.2f} before, {after:.2f} after")
