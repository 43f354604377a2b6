import pytest

from mlxrl_runs.maths.anchors import (
    episode_advantage,
    group_sizes,
    joint_advantage,
    similar_step_groups,
    step_advantage,
    step_groups,
)
from mlxrl_runs.maths.baselines import group_advantage


def test_one_anchor_in_two_tasks_makes_two_groups():
    assert step_groups(["t", "t", "u", "u"], ["red", "blue", "red", "red"]) == [0, 1, 2, 2]


def test_a_revisit_is_one_more_member():
    groups = step_groups(["t"] * 4, ["red", "blue", "red", "red"])
    assert groups == [0, 1, 0, 0]
    assert group_sizes(groups) == [3, 1]


def test_group_sizes_tell_how_much_the_anchors_can_teach():
    sizes = group_sizes(step_groups(["t"] * 5, ["a", "b", "a", "c", "a"]))
    assert sizes == [3, 1, 1]
    assert sum(sizes) / len(sizes) == pytest.approx(5 / 3)
    assert group_sizes([]) == []


def test_a_similar_text_joins_the_first_group_that_is_like_enough():
    # abcd, abcx: 3 of 4 letters in common, 2 * 3 / 8 = .75; abxx: 2 * 2 / 8 = .5 with abcd, .75 with abcx, which only
    # joined; xxxx: 2 * 1 / 8 with abcd
    texts = ["abcd", "abcx", "abxx", "xxxx", "abcx"]
    assert similar_step_groups(["t"] * 5, texts, 0.75) == [0, 0, 1, 2, 0]
    assert similar_step_groups(["t"] * 5, texts, 0.5) == [0, 0, 0, 1, 0]
    assert similar_step_groups(["t"] * 5, texts, 0.76) == [0, 1, 2, 3, 1]


def test_of_several_groups_that_are_like_enough_the_earliest_is_joined():
    # ab and cd have nothing in common; abcd shares 2 of 2 + 4 letters twice over with each: 2 * 2 / 6 = .67
    assert similar_step_groups(["t"] * 3, ["cd", "ab", "abcd"], 0.6) == [0, 1, 0]


def test_texts_of_two_tasks_are_never_similar():
    assert similar_step_groups(["t", "u", "t"], ["abcd", "abcd", "abcx"], 0.5) == [0, 1, 0]


def test_a_similarity_of_one_is_the_grouping_by_equal_texts():
    tasks, texts = ["t", "t", "u", "t", "u", "t"], ["a" * 300, "b", "b", "a" * 300, "", "b" * 2]
    assert similar_step_groups(tasks, texts, 1.0) == step_groups(tasks, texts) == [0, 1, 2, 0, 3, 4]


def test_frequent_letters_of_a_long_text_count_as_much_as_any():
    # 300 times a against b and 299 times a: 2 * 299 / 600
    assert similar_step_groups(["t", "t"], ["a" * 300, "b" + "a" * 299], 0.99) == [0, 0]


def test_a_step_is_compared_with_the_steps_taken_in_the_same_state():
    # state 0 holds 1 and 0: +-.5 centred, std .70711 -> +-.70711; the step alone in state 1 says nothing
    assert step_advantage([1.0, 7.0, 0.0], [0, 1, 0], "none") == [0.5, 0.0, -0.5]
    assert step_advantage([1.0, 7.0, 0.0], [0, 1, 0], "group", 0.0) == pytest.approx([0.70711, 0, -0.70711], abs=1e-5)


def test_equal_step_returns_give_exactly_zero():
    assert step_advantage([0.1] * 3, [0] * 3, "group", 1e-30) == [0.0] * 3


def test_trajectory_statistics_count_a_long_episode_once():
    # returns 1 and 0: mean .5. By steps the first counts three times: mean .75
    assert episode_advantage([1, 0], ["t", "t"], [3, 1], "none") == [0.5, -0.5]
    assert episode_advantage([1, 0], ["t", "t"], [3, 1], "none", "step") == [0.25, -0.75]


def test_step_statistics_also_scale_by_the_spread_over_steps():
    # 1 1 1 0: mean .75, squares 3 / 16 + 9 / 16 = .75, std sqrt(.75 / 3) = .5 -> .5 and -1.5
    got = episode_advantage([1, 0], ["t", "t"], [3, 1], "group", "step", eps=0.0)
    assert got == pytest.approx([0.5, -1.5], abs=1e-12)


def test_a_lone_trajectory_has_no_episode_advantage_however_many_steps_it_took():
    for statistics in ("trajectory", "step"):
        assert episode_advantage([1.0], ["t"], [5], "group", statistics) == [0.0]


def test_the_joint_advantage_adds_omega_times_the_step_part():
    # trajectory 0 took steps 0 and 2, trajectory 1 step 1: 1 + .5 * 4, 1 + .5 * -2 | -1 + .5 * 6
    got = joint_advantage([1.0, -1.0], [4.0, 6.0, -2.0], [0, 1, 0], 0.5)
    assert got == [[3.0, 0.0], [2.0]]


def test_omega_zero_is_the_episode_baseline_of_grpo():
    returns, tasks = [1.0, 0.0, 0.5, 2.0], ["t", "t", "t", "u"]
    episode = episode_advantage(returns, tasks, [2, 1, 1, 1], "group")
    joint = joint_advantage(episode, [9.0] * 5, [0, 0, 1, 2, 3], 0.0)
    grpo = group_advantage(returns, tasks, "group")
    assert joint == [[grpo[0]] * 2, [grpo[1]], [grpo[2]], [grpo[3]]]


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="group, batch or none"):
        step_advantage([1.0], [0], "std")
    with pytest.raises(ValueError, match="trajectory or step"):
        episode_advantage([1.0], ["t"], [1], "group", "steps")
