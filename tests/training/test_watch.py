"""What a run that goes on without learning is told, and what a good run is not told."""

import re

import pytest

from mlxrl_runs import compose
from mlxrl_runs.problems import walk
from mlxrl_runs.training.watch import WINDOW, Watch

GIGPO = dict(walk(compose([]).plain())) | {"algorithm.max_refills": 8}  # the last is dapo's
GOOD = {
    "reward/mean": 0.1, "reward/std": 0.3, "reward/success": 0.1, "group/zero_std_fraction": 0.25,
    "completion/truncated_fraction": 0.1, "advantage/std": 1.6, "grad/norm": 0.4, "policy/entropy": 0.6,
    "anchor/singleton_fraction": 0.02,
}  # fmt: skip
EQUAL = {"group/zero_std_fraction": 1.0, "reward/success": 0.0}
CUT = {"completion/truncated_fraction": 1.0}
INERT = {"grad/norm": 0.0}
SURE = {"policy/entropy": 0.001}
LONELY = {"anchor/singleton_fraction": 0.95}
SHORT = {"refill/kept_groups": 5}


def told(*steps, **keys):
    """(step, text) of all warnings; a step is what differs from a good one."""
    watch = Watch(GIGPO | {name.replace("__", "."): value for name, value in keys.items()})
    return [(number, text) for number, step in enumerate(steps, 1) for text in watch.after_step(GOOD | step)]


@pytest.mark.parametrize(
    ("trouble", "says", "does"),
    [
        (EQUAL, "every group earned the same", "trainer.warm_start.steps=20"),
        (CUT, "every action was cut at rollout.max_completion_tokens=8", "rollout.max_completion_tokens=16"),
        (INERT, "the gradient was exactly 0", "adapter.targets=all"),
        (LONELY, "95% of the turns", "algorithm.omega=0"),
        (SHORT, "algorithm.max_refills=8 rounds of sampling did not fill the batch", "tasks_per_step=5"),
    ],
    ids=["equal", "cut", "inert", "lonely", "short"],
)
def test_a_trouble_is_told_once_when_it_has_lasted_and_again_only_after_it_was_gone(trouble, says, does):
    troubled, fine = [trouble] * WINDOW, [{}] * WINDOW
    [(step, text)] = told(*troubled, *troubled, *troubled)
    assert step == WINDOW and says in text and does in text
    assert told(*troubled[1:], {}, *troubled[1:]) == []  # four in a row are not five
    # two better steps in between are no end of it
    assert [step for step, _ in told(*troubled, {}, {}, *troubled)] == [5]
    assert [step for step, _ in told(*troubled, *fine, *troubled)] == [5, 15]


def test_a_policy_that_is_always_right_is_not_told_that_its_groups_agree():
    assert told(*[EQUAL | {"reward/success": 1.0}] * 20) == []
    [(_, text)] = told(*[EQUAL | {"reward/success": 0.9}] * 20)
    assert "harder tasks" in text and "warm_start" not in text


def test_a_full_batch_and_one_that_is_short_for_being_solved_are_no_trouble():
    assert told(*[SHORT | {"reward/success": 0.95}] * 9) == []
    assert told(*[{"refill/kept_groups": 12}] * 9) == []


def test_rewards_that_became_equal_in_training_are_put_down_to_training():
    [(_, text)] = told({}, *[EQUAL | {"reward/mean": -0.6}] * 9)
    assert "they differed, and earned more" in text and "optimizer.learning_rate=0.0004" in text
    assert "group_size" not in text


def test_actions_that_are_cut_on_purpose_or_right_all_the_same_are_no_trouble():
    assert told(*[CUT] * 9, rollout__ignore_eos=True) == []
    assert told(*[CUT | {"reward/success": 0.8}] * 9) == []


def test_no_gradient_without_advantages_is_no_trouble_of_its_own():
    assert told(*[INERT | {"advantage/std": 0.0}] * 9) == []


def test_no_gradient_of_a_policy_that_is_sure_is_put_down_to_the_learning_rate():
    # entropy began there, so nothing fell
    [(_, text)] = told(*[INERT | {"policy/entropy": 1e-5}] * 9)
    assert "sure of every token" in text and "optimizer.learning_rate=0.0004" in text


def test_no_gradient_where_every_token_is_masked_is_put_down_to_the_masks():
    [(_, text)] = told(*[INERT | {"progress/trained_tokens": 0}] * 9)
    assert "no token was trained" in text and "algorithm.mask_longer_than" in text and "adapter" not in text
    [(_, text)] = told(*[INERT | {"progress/trained_tokens": 7}] * 9)
    assert "adapter.targets=all" in text


def test_low_entropy_is_told_only_where_the_reward_did_not_rise():
    # noise of a gain: hypot(.3 / sqrt(48), .3 / sqrt(5 x 48)) = .0474, twice that is .095
    collapsed = [SURE | {"reward/mean": 0.19}] * 9
    [(step, text)] = told({}, *collapsed)
    assert step == 6 and "fell from 0.6 to 0.001" in text and "optimizer.learning_rate=0.0004" in text
    risen = [SURE | {"reward/mean": 0.21}] * 9
    assert told({}, *risen) == []
    assert told({}, *[{"policy/entropy": 0.03}] * 9) == []  # .05 of where it began is not below it
    assert told({}, *[SURE | {"reward/success": 0.95}] * 9) == []  # no room to rise


def test_lonely_states_do_not_matter_where_nothing_reads_them():
    assert told(*[LONELY] * 9, algorithm__omega=0.0) == []
    without = {name: value for name, value in GOOD.items() if not name.startswith("anchor/")}
    watch = Watch(GIGPO)
    assert [watch.after_step(without) for _ in range(9)] == [[]] * 9


def test_numbers_that_are_not_finite_warn_of_nothing():
    nan = dict.fromkeys(GOOD, float("nan"))
    assert told(*[nan] * 9) == []


@pytest.mark.parametrize("overrides", [["env.reward=sparse"], ["algorithm=grpo", "adapter=full", "env=arithmetic"]])
def test_every_key_that_a_warning_names_is_one(overrides):
    keys = dict(walk(compose(overrides).plain()))
    texts = []
    for first in ({}, EQUAL | CUT):
        for trouble in (EQUAL, CUT, INERT, INERT | SURE, SURE, LONELY):
            watch = Watch(keys)
            for step in (first, *[trouble] * WINDOW):
                texts += watch.after_step(GOOD | {"reward/mean": 0.0 if step is trouble else 0.1} | step)
    named = {key for text in texts for key in re.findall(r"\b(?:[a-z_]+\.)+[a-z_]+\b|\b[a-z_]+(?==)", text)}
    assert len(texts) >= 10 and {"optimizer.learning_rate", "rollout.max_completion_tokens"} <= named
    assert [key for key in sorted(named - {"adapter"}) if key not in keys] == []
