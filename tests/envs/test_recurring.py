import random

import pytest
from pydantic import ValidationError

from building import settings


def doors(**changes):
    return settings("env", "recurring", **changes)


def test_there_are_at_least_two_thousand_distinct_tasks():
    world = doors()
    tasks = {world._space.task(number) for number in range(world._space.count)}
    assert len(tasks) == world._space.count == 4096


def test_training_and_held_out_layouts_are_disjoint():
    world, stream = doors(), random.Random(0)
    held_out = set(world.held_out_tasks())
    trained = {world.sample_task(stream) for _ in range(60_000)}
    assert len(held_out) == 409
    assert not held_out & trained
    assert len(trained | held_out) == 4096  # 60,000 draws reach every layout


def test_a_wrong_verb_brings_the_same_state_back_and_the_right_one_a_new_state():
    world = doors()
    episode = world.make("red-blue-red-red", 0, 0)
    first = episode.state_id(episode.reset())
    right = episode.oracle_action()
    wrong = next(f"<action>{verb}</action>" for verb in ("push", "pull") if verb not in right)
    result = episode.step(wrong)
    assert episode.state_id(result.observation) == first
    result = episode.step(right)
    assert (result.reward, result.observation) == (0.25, "door blue")
    assert episode.state_id(result.observation) != first


def test_the_anchor_is_the_room_of_a_layout_and_not_the_colour():
    episode = doors().make("red-red-blue-blue", 0, 0)
    first = episode.state_id(episode.reset())
    second = episode.state_id(episode.step(episode.oracle_action()).observation)
    assert first != second  # both doors are red, but what is left to do differs


def test_the_oracle_earns_the_exit_and_every_room():
    # rooms 2, 3 and 4 pay .25 each, the exit pays 1
    episode = doors().make("red-blue-green-gold", 0, 0)
    episode.reset()
    results = [episode.step(episode.oracle_action()) for _ in range(4)]
    assert sum(result.reward for result in results) == 1.75
    assert results[-1].done and results[-1].info["success"] == 1.0


def test_sparse_reward_pays_the_exit_alone_and_malformed_actions_cost_under_either():
    episode = doors(reward="sparse").make("red-blue-green-gold", 0, 0)
    episode.reset()
    assert episode.step("push").reward == pytest.approx(-0.1)
    assert episode.step("<action>push</action> please").reward == pytest.approx(-0.1)
    assert [episode.step(episode.oracle_action()).reward for _ in range(4)] == [0.0, 0.0, 0.0, 1.0]


def test_the_rules_stand_before_the_first_observation_when_asked_for():
    assert doors().make("red-red-red-red", 0, 0).reset() == "door red"
    explained = doors(explain=True).make("red-red-red-red", 0, 0).reset()
    assert explained.endswith("door red") and "push, pull, lift, slide" in explained


def test_a_world_that_cannot_be_won_is_refused():
    with pytest.raises(ValidationError, match="max_turns=3"):
        doors(max_turns=3)
    with pytest.raises(ValidationError, match="evaluate on"):
        doors(rooms=1, colours=2)


def test_the_rules_can_say_which_verb_opens_which_colour_and_only_there():
    told = (
        settings("env", "recurring", explain=True, show_verbs=True, colours=3, verbs=2).make("red-blue", 0, 0).reset()
    )
    assert "alone: red push, blue pull, green push. Answer" in told
    assert "red push" not in settings("env", "recurring", explain=True).make("red-blue-red-red", 0, 0).reset()
    with pytest.raises(ValueError, match="show_verbs=true adds to what explain=true says"):
        settings("env", "recurring", show_verbs=True)


def test_an_answer_goes_on_behind_its_prefix():
    world = settings("env", "recurring", answer_prefix="<action>").make("red-blue-red-red", 0, 0)
    assert world.oracle_action() == "push</action>" and world.step("push</action>").reward == 0.25
    assert world.step("<action>pull</action>").reward == -0.1  # the prefix is there already
