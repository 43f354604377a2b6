"""H20 and its kin: what an environment may answer, and how it is told when it answers something else."""

import math

import pytest

from mlxrl_runs.core.protocols import StepResult
from mlxrl_runs.errors import EnvironmentFailure
from mlxrl_runs.rollout.environment import last_text, opened, reset, step


class Answers:
    max_turns = 1

    def __init__(self, answer):
        self.answer = answer

    def reset(self):
        return self.answer

    def step(self, action):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("reward", "complaint"),
    [
        (math.nan, "finite"),
        (math.inf, "finite"),
        (-1e300, "finite"),  # no float32
        (None, "one number, got None"),
        ("1", "one number, got '1'"),
        ([1.0], r"one number, got \[1.0\]"),
        ((x for x in [1.0]), "one number"),
    ],
)
def test_h20_a_reward_that_is_not_one_finite_number_is_refused_by_task_and_turn(reward, complaint):
    with pytest.raises(EnvironmentFailure, match=f"task 'seven', turn 2: the reward must be .*{complaint}"):
        step(Answers(StepResult("", reward, True)), "action", "task 'seven', turn 2")


def test_h20_booleans_count_as_one_and_zero():
    assert step(Answers(StepResult("", True, True)), "", "here").reward == 1.0
    assert step(Answers(StepResult("", False, True)), "", "here").reward == 0.0


def test_h20_an_exception_keeps_its_name_and_gets_a_place():
    with pytest.raises(EnvironmentFailure, match=r"here: step.. raised ZeroDivisionError: oops"):
        step(Answers(ZeroDivisionError("oops")), "", "here")


def test_anything_but_a_step_result_is_refused():
    with pytest.raises(EnvironmentFailure, match="must return a StepResult, got tuple"):
        step(Answers(("observation", 1.0, True, {})), "", "here")


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: None, "NoneType, which has no reset, step, state_id"),
        (lambda: 1 / 0, "raised ZeroDivisionError"),
        (lambda: Turns(0), "max_turns must be a whole number >= 1, got 0"),
        (lambda: Turns(2.5), "got 2.5"),
        (lambda: Turns(None), "got None"),
    ],
)
def test_what_a_factory_makes_is_checked_before_it_is_played(make, complaint):
    with pytest.raises(EnvironmentFailure, match=f"task 'seven': .*{complaint}"):
        opened(make, "seven")


class Turns(Answers):
    def __init__(self, limit):
        self.max_turns = limit

    def state_id(self, observation):
        return "s"


def test_half_a_surrogate_pair_is_no_text():
    with pytest.raises(EnvironmentFailure, match="surrogate"):
        reset(Answers("a\ud800"), "t")


def test_observations_are_text_and_parts_are_numbers():
    with pytest.raises(EnvironmentFailure, match="first observation as text, got 3"):
        reset(Answers(3), "t")
    with pytest.raises(EnvironmentFailure, match="reward_parts"):
        step(Answers(StepResult("", 1.0, True, {}, {"format": None})), "", "here")


@pytest.mark.parametrize(
    "opening",
    [
        [],
        ["hello"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "3+4"}, {"role": "assistant", "content": "7"}],
        {"role": "user", "content": "3+4"},
    ],
)
def test_an_opening_that_is_neither_text_nor_a_conversation_is_refused(opening):
    with pytest.raises(EnvironmentFailure, match=r"task 'seven': reset\(\) must return the first observation as text"):
        reset(Answers(opening), "seven")


def test_a_conversation_is_an_opening_too_and_its_last_message_the_observation():
    opening = [{"role": "assistant", "content": "7"}, {"role": "user", "content": "sure?"}]
    assert last_text(reset(Answers(opening), "seven")) == "sure?"
    assert last_text(reset(Answers("3+4"), "seven")) == "3+4"


@pytest.mark.parametrize("name", ["mean", "std", "success"])
def test_a_part_named_like_a_number_of_the_whole_reward_is_refused(name):
    # it would be logged as reward/mean, over the mean reward
    with pytest.raises(EnvironmentFailure, match=rf"reward_parts\['{name}'\]: .* give this part another name"):
        step(Answers(StepResult("", 1.0, True, reward_parts={"room": 1.0, name: 0.5})), "x", "task 't', turn 1")
