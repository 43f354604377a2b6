"""What a run from Python tells its callbacks, and what it holds while they are called."""

import gc
import json

import pytest

from mlxrl_runs import ConfigError, StepResult, compose, train
from mlxrl_runs.training.update import Updater

SHORT = ["env=arithmetic", "steps=2", "tasks_per_step=2", "trainer.evaluation_episodes=8", "tracking=jsonl"]


def test_callbacks_are_called_after_every_step_the_last_one_included(tmp_path):
    steps: list[int] = []
    train(compose([*SHORT, f"paths.output={tmp_path}"]), callbacks=[lambda step, metrics: steps.append(step)])
    assert steps == [1, 2]


def test_the_optimizer_of_a_warm_start_is_gone_when_rl_begins(tmp_path):
    # under full training its moments are two more copies of the weights
    optimizers: list[int] = []

    def count(step, metrics):
        gc.collect()
        optimizers.append(sum(isinstance(thing, Updater) for thing in gc.get_objects()))

    warm = compose([*SHORT, "adapter=full", "trainer.warm_start.steps=1", f"paths.output={tmp_path}"])
    train(warm, callbacks=[count])
    assert optimizers == [1, 1]


class Mute:
    """Shows nobody how."""

    max_turns = 1

    def __init__(self, task, seed, group_index):
        self.task = task

    def reset(self):
        return self.task

    def step(self, action):
        return StepResult("", 0.0, True)

    def state_id(self, observation):
        return ""


def test_a_warm_start_without_examples_is_refused_before_an_evaluation_is_waited_for(tmp_path):
    with pytest.raises(ConfigError, match="the environment shows no examples"):
        train(compose([*SHORT, "trainer.warm_start.steps=1", f"paths.output={tmp_path}"]), env=Mute)
    [folder] = tmp_path.glob("*/*_*")
    assert json.loads((folder / "evaluation.json").read_text())["before"] is None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"callbacks": print}, "^callbacks: got .* a list of functions"),
        ({"callbacks": [3]}, r"^callbacks\[0\]: got 3; allowed: a function"),
        ({"reward": 3}, "^reward: got 3; allowed: a function"),
        ({"reward": {}}, "^reward: got {}; at least one function"),
        ({"reward": {"mine": None}}, r"^reward\['mine'\]: got None; allowed: a function"),
        ({"env": "arithmetic"}, "^env: got 'arithmetic'; allowed: a function"),
    ],
)
def test_what_cannot_be_called_leaves_no_folder(tmp_path, given, complaint):
    with pytest.raises(ConfigError, match=complaint):
        train(compose([*SHORT, f"paths.output={tmp_path}"]), **given)
    assert not list(tmp_path.iterdir())
