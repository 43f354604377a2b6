import random

import pytest

from building import settings
from mlxrl_runs.envs.arithmetic import solve


def arithmetic(**changes):
    return settings("env", "arithmetic", **changes)


def test_problems_are_solved_by_the_usual_rules():
    assert solve("2-3-4") == -5
    assert solve("2+3*4") == 14
    assert solve("2-(3-4)") == 3
    assert solve("3*(-4)+2") == -10


def test_held_out_problems_are_never_trained_on():
    world, stream = arithmetic(), random.Random(1)
    trained = {world.sample_task(stream) for _ in range(10_000)}
    assert not trained & set(world.held_out_tasks())
    assert len(trained) == 720 and len(world.held_out_tasks()) == 80


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ("<think>3 and 4</think><solution>7</solution>", {"format": 0.1, "exact": 1.0}),
        ("<think></think><solution>8</solution>", {"format": 0.1, "exact": 0.0}),
        ("<think></think><solution>7</solution><solution>8</solution>", {"format": 0.0, "exact": 0.0}),
        ("<solution>7</solution>", {"format": 0.0, "exact": 0.0}),
        ("<think></think><solution>3+4</solution>", {"format": 0.0, "exact": 0.0}),
        ("7", {"format": 0.0, "exact": 0.0}),
    ],
)
def test_format_and_exactness_are_paid_apart(answer, parts):
    result = arithmetic().make("3+4", 0, 0).step(answer)
    assert result.reward_parts == parts
    assert result.reward == pytest.approx(sum(parts.values()))
    assert result.done


def test_every_level_makes_distinct_problems_its_oracle_solves():
    world = arithmetic(levels=[1, 2, 3], max_operand=3, operators=["+", "-", "*"])
    problems = [world._space.task(number) for number in range(world._space.count)]
    assert len(set(problems)) == len(problems) == 16 * 3 + 2 * 64 * 9
    for problem in problems[::37]:
        episode = world.make(problem, 0, 0)
        assert episode.step(episode.oracle_action()).info["success"] == 1.0
