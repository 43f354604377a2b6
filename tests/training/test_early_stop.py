"""What ends training early, and how it is said."""

import json
import math

import pytest

from mlxrl_runs import ConfigError, compose, train
from mlxrl_runs.training.early_stop import EarlyStop

SHORT = ["env=arithmetic", "steps=4", "tasks_per_step=2", "trainer.evaluation_episodes=8", "tracking=jsonl"]


def stop(above=None, below=None, patience=1, every=1):
    return EarlyStop("reward/success", above, below, patience, every)


def reasons(stopping, *values):
    return [stopping.after_step(step, {"reward/success": value}) for step, value in enumerate(values, 1)]


def test_a_bound_is_passed_and_not_reached():
    assert reasons(stop(above=0.95), 0.9, 0.95, 0.97) == [None, None, "reward/success 0.97 above 0.95 at step 3"]
    assert reasons(stop(below=0.5), 0.5, 0.25) == [None, "reward/success 0.25 below 0.5 at step 2"]


def test_patience_counts_measurements_in_a_row_and_steps_without_one_change_nothing():
    stopping = stop(above=0.9, patience=2)
    assert reasons(stopping, 1.0, 0.8, 1.0) == [None] * 3
    assert stopping.after_step(4, {}) is None
    assert stopping.after_step(5, {"reward/success": 0.92}) == (
        "reward/success 0.92 above 0.9 at step 5, 2 measurements running"
    )


def test_a_number_that_is_none_is_beyond_no_bound():
    assert reasons(stop(above=0.0), math.nan) == reasons(stop(below=0.0), math.nan) == [None]


def test_a_metric_that_does_not_come_is_told_once():
    stopping, metrics = stop(above=1.0, every=10), {"reward/succes": 0.1, "loss/total": 0.0}
    assert [stopping.missing(step, False, metrics) for step in (1, 9)] == [None, None]
    assert "reward/success was not measured by step 10" in (warning := stopping.missing(10, False, metrics))
    assert "Did you mean reward/succes?" in warning
    assert stopping.missing(11, False, metrics) is None
    assert stop(above=1.0, every=10).missing(3, True, metrics) is not None  # the run ends before it was due


def test_a_metric_that_came_is_not_missing():
    stopping = stop(above=2.0)
    reasons(stopping, 1.0)
    assert stopping.missing(1, True, {}) is None


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["above=1"], "trainer.early_stop.metric: got null, but trainer.early_stop.above is given"),
        (["metric=reward/success"], "got neither; trainer.early_stop.metric=reward/success needs exactly one"),
        (["metric=reward/success", "above=1", "below=0"], "got both"),
        (["metric=reward/sucess", "above=1"], "got 'reward/sucess'.* Did you mean reward/success?"),
        (["metric=greedy_success", "above=1"], "got 'greedy_success'.* Did you mean eval/greedy_success?"),
        (["metric=reward/", "above=1"], "got 'reward/'"),
        (["metric=eval/greedy_success", "above=1"], "Try trainer.eval_every=10"),
        (["metric=kl/old", "below=1"], "algorithm.updates_per_batch=1"),
        (["metric=loss/kl", "below=1"], "algorithm.kl_coef=0"),
        (["metric=warm_start/steps", "below=1"], "once, before training"),
        (["metric=reward/success", "above=1", "patience=0"], "trainer.early_stop.patience: got 0; allowed: .* >= 1"),
        (["metric=reward/success", "above=nan"], "trainer.early_stop.above: got nan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_stop_that_could_never_act_is_refused(overrides, says):
    with pytest.raises(ConfigError, match=says):
        compose([f"trainer.early_stop.{override}" for override in overrides])


def test_what_a_run_or_its_settings_make_measurable_is_accepted():
    for metric, *more in (
        ("eval/greedy_success", "trainer.eval_every=2"),
        ("kl/reference",),
        ("kl/old", "algorithm.updates_per_batch=2"),
        ("loss/kl", "algorithm.kl_coef=0.1"),
        ("reward/room",),
        ("reward/stdev",),
        ("eval/sampled_exit", "trainer.eval_every=2"),
    ):
        config = compose([f"trainer.early_stop.metric={metric}", "trainer.early_stop.below=1", *more])
        assert config.trainer.early_stop.metric == metric


def test_kl_that_nobody_measures_is_refused():
    with pytest.raises(ConfigError, match=r"Try tracking\.kl_every=1"):
        compose(["trainer.early_stop.metric=kl/reference", "trainer.early_stop.above=1", "tracking.kl_every=0"])


def summary_of(path, *overrides, callbacks=()):
    run = train(compose([*SHORT, f"paths.output={path}", *overrides]), callbacks=callbacks)
    return json.loads((run.folder / "summary.json").read_text()), run


def test_a_stop_on_an_evaluation_finishes_the_run_with_that_evaluation(tmp_path, capsys):
    bound = ["trainer.early_stop.metric=eval/greedy_reward", "trainer.early_stop.above=-1", "trainer.eval_every=2"]
    summary, run = summary_of(tmp_path, *bound)
    assert summary["state"] == "finished" and summary["steps"] == 2
    assert summary["stopped"].startswith("eval/greedy_reward ")
    assert summary["stopped"].endswith(" above -1 at step 2")
    assert run.evaluation["after"]["greedy"]["reward"] == run.metrics[-1]["eval/greedy_reward"]
    assert (run.folder / "adapters").is_dir() and (run.folder / "checkpoints/step_000002").is_dir()
    printed = capsys.readouterr().out
    assert "Training stops: eval/greedy_reward" in printed and "stopped early  eval/greedy_reward" in printed
    assert printed.count("after step 2") == 1  # evaluated once


@pytest.mark.parametrize(
    ("overrides", "callbacks", "stopped"),
    [
        (["budget.episodes=9"], (), "budget.episodes=9 reached at step 2"),
        (["budget.tokens=1"], (), "budget.tokens=1 reached at step 1"),
        (["budget.minutes=1e-9"], (), "budget.minutes=1e-09 reached at step 1"),
        ([], (lambda step, metrics: step == 3,), "a callback returned True at step 3"),
        (["steps=1"], (lambda step, metrics: True,), None),
    ],
    ids=["episodes", "tokens", "minutes", "callback", "all steps"],
)
def test_every_early_end_is_told_and_a_whole_run_is_none(tmp_path, overrides, callbacks, stopped):
    summary, _ = summary_of(tmp_path, *overrides, callbacks=callbacks)
    assert summary["stopped"] == stopped and summary["state"] == "finished" and summary["warnings"] == []


class Stingy:
    """Pays nothing."""

    max_turns = 1

    def __init__(self, task, seed, group_index):
        pass

    def reset(self):
        return "say something"

    def step(self, action):
        from mlxrl_runs import StepResult

        return StepResult("", 0.0, True)

    def state_id(self, observation):
        return ""


def test_what_was_said_during_a_run_is_in_its_summary(tmp_path, capsys):
    missing = ["trainer.early_stop.metric=reward/kindness", "trainer.early_stop.above=1", "steps=5"]
    config = compose([*SHORT, f"paths.output={tmp_path}", *missing, "rollout.max_completion_tokens=2"])
    run = train(config, env=Stingy)
    warnings = json.loads((run.folder / "summary.json").read_text())["warnings"]
    assert [warning["step"] for warning in warnings][:3] == [0, 1, 5]
    assert "reward/kindness was not measured by step 1" in warnings[1]["text"]
    assert "every group earned the same" in warnings[2]["text"]
    printed = capsys.readouterr().out
    assert "Step 5: In each of the last 5 steps" in printed
    assert f"warnings       {len(warnings)}, at steps 0, 1, 5" in printed
