"""Promises every environment keeps; a new yaml in conf/env is tested at once."""

import random

import pytest

from building import CONF, engine_of, settings, tiny
from mlxrl_runs.core.protocols import Demonstrator
from mlxrl_runs.rollout.environment import ask_state, reset, step
from mlxrl_runs.training.evaluate import bounds

FILE = """
from mlxrl_runs.core.protocols import StepResult
class Echo:
    max_turns = 1
    def __init__(self, task): self.task = task
    def reset(self): return self.task
    def step(self, action): return StepResult("", float(action == self.task), True)
    def state_id(self, observation): return self.task
def make(task, seed, group_index): return Echo(task)
"""


@pytest.fixture(params=sorted(file.stem for file in (CONF / "env").glob("*.yaml")))
def family(request, tmp_path):
    if request.param != "python":
        return settings("env", request.param)
    (tmp_path / "mine.py").write_text(FILE)
    return settings("env", "python", file=str(tmp_path / "mine.py"))


def test_training_tasks_are_never_held_out_and_draws_repeat(family):
    draw = lambda: [family.sample_task(stream) for stream in [random.Random(3)] for _ in range(500)]
    assert draw() == draw()
    assert not set(draw()) & set(family.held_out_tasks())
    assert list(family.held_out_tasks()) == list(family.held_out_tasks())


def test_siblings_see_the_same_world(family):
    task = family.held_out_tasks()[0]
    one, other = family.make(task, 5, 0), family.make(task, 5, 1)
    assert reset(one, task) == reset(other, task)
    assert one.state_id(task) == other.state_id(task)
    assert step(one, "nonsense", "here") == step(other, "nonsense", "here")


def test_it_takes_any_text_and_ends(family):
    stream = random.Random(0)
    environment = family.make(family.sample_task(stream), 0, 0)
    observation = reset(environment, "t")
    for text in ["", "\x00", "<action>", "é" * 500, "__import__('os')"] * 20:
        assert ask_state(environment, observation, "here")
        result = step(environment, text, "here")
        observation = result.observation
        if result.done:
            break
    assert environment.max_turns >= 1


def test_the_oracle_beats_the_random_policy_where_there_is_one(family):
    found = bounds(engine_of(tiny()), family, family.held_out_tasks()[:50], seed=0)
    if isinstance(family.make(family.held_out_tasks()[0], 0, 0), Demonstrator):
        assert found["oracle"]["success"] == 1.0 > found["random"]["success"]
    else:
        assert found == {}
