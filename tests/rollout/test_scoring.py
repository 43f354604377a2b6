"""How the parts of a reward become one number, and what happens when one of them misbehaves."""

import pytest

from building import engine_of, settings, some_requests, tiny
from mlxrl_runs.core.protocols import Completion, StepResult
from mlxrl_runs.errors import ConfigError, EnvironmentFailure
from mlxrl_runs.rewards.file import FileReward
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.rollout.scoring import WeightedReward


def completion(text, answer="46", tokens=3, success=0.0):
    paid = StepResult("", 0.5, True, {"success": success, "rooms": 2.0}, {"room": 0.5})
    return Completion(text, "question", "task 7", answer, tokens, 6, False, paid)


def reward(**parts):
    return WeightedReward({label: settings("reward", kind, **changes) for label, (kind, changes) in parts.items()})


def of(function):
    return WeightedReward({"mine": FileReward.of(function, "<test>", "mine")})


def test_the_reward_is_the_weighted_sum_and_every_part_is_logged_unweighted():
    # right: 1 x 1 + 0.1 x -(3 / 6) = 0.95; the part of weight 0 is measured only
    scored = reward(
        numeric=("numeric", {}), length=("length", {}), first=("numeric", {"which": "first", "weight": 0.0})
    ).score(completion("40 no, 46"))
    assert scored.reward == pytest.approx(0.95)
    assert scored.reward_parts == {"numeric": 1.0, "length": -0.5, "first": 0.0}
    assert scored.info["success"] == 1.0 and scored.info["rooms"] == 2.0


def test_a_part_that_depends_on_being_right_does_not_depend_on_the_order_of_the_parts():
    ahead = reward(length=("length", {}), numeric=("numeric", {})).score(completion("46"))
    assert ahead.reward == pytest.approx(0.95) and list(ahead.reward_parts) == ["length", "numeric"]


def test_success_is_what_the_paid_judges_say_and_the_environments_word_without_one():
    assert reward(numeric=("numeric", {})).score(completion("46", success=0.0)).info["success"] == 1.0
    assert reward(numeric=("numeric", {})).score(completion("47", success=1.0)).info["success"] == 0.0
    assert reward(length=("length", {})).score(completion("47", success=1.0)).info["success"] == 1.0
    both = reward(environment=("environment", {}), numeric=("numeric", {}))
    assert both.score(completion("46", success=0.0)).info["success"] == 0.0


def test_the_environments_own_parts_stay_beside_its_reward():
    scored = reward(environment=("environment", {"weight": 2.0})).score(completion("x"))
    assert scored.reward == 1.0 and scored.reward_parts == {"room": 0.5, "environment": 0.5}


def test_an_environments_part_and_a_part_of_one_name_are_both_logged():
    scored = reward(environment=("environment", {}), room=("truncated", {})).score(completion("x"))
    assert scored.reward_parts == {"environment_room": 0.5, "environment": 0.5, "room": 0.0}


def test_a_sum_that_no_advantage_can_hold_is_refused():
    # 1 x 1e40 is a finite float, and infinite in the float32 that advantages are
    with pytest.raises(EnvironmentFailure, match="reward: the weighted sum of its parts for task 'task 7' must be fin"):
        reward(numeric=("numeric", {"weight": 1e40})).score(completion("46"))


def test_a_reward_that_compares_refuses_an_environment_without_an_answer():
    with pytest.raises(ConfigError, match=r"reward\.numeric: needs the right answer"):
        reward(numeric=("numeric", {})).score(completion("46", answer=None))


@pytest.mark.parametrize(
    "answer", [None, "1", [1.0], [1, 0, 1], (x for x in [1]), float("nan"), float("inf"), {"a": 1}, 1e39]
)
def test_h20_a_function_that_returns_anything_but_one_number_is_named(answer):
    with pytest.raises(EnvironmentFailure, match=r"reward\.mine, for task 'task 7'.* must be"):
        of(lambda completion: answer).score(completion("x"))


def test_h20_a_function_that_raises_is_named_with_what_it_saw():
    with pytest.raises(EnvironmentFailure, match=r"reward\.mine: raised ZeroDivisionError.*'task 7'.*'some text'"):
        of(lambda completion: 1 / 0).score(completion("some text"))


def test_h20_booleans_are_one_and_zero():
    assert of(lambda completion: True).score(completion("x")).reward == 1.0


def test_the_engine_hands_a_reward_what_was_written_and_what_was_right():
    seen = []

    def look(given):
        seen.append(given)
        return len(given.text)

    engine = engine_of(tiny(), scorer=of(look), max_completion_tokens=5)
    trajectories, _ = engine.play(some_requests("arithmetic", tasks=2, members=3), Sampling())
    for trajectory, given in zip(trajectories, seen, strict=True):
        [turn] = trajectory.turns
        assert (given.text, given.task, given.token_count) == (turn.text, trajectory.task, len(turn.action))
        assert given.answer == str(eval(trajectory.task)) and given.max_tokens == 5
        assert given.is_truncated == (turn.stop.value == "length")
        assert turn.reward == len(turn.text)


def test_a_function_that_is_not_in_its_file_is_told_under_the_label_of_its_part(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def other(completion): return 1.0")
    with pytest.raises(ConfigError, match=rf"^reward\.mine\.function=reward: path={file} has no callable"):
        reward(mine=("file", {"path": str(file)})).score(completion("46"))
