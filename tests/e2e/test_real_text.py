"""Runs that end early, start warm, or are paid by named rewards, in whole."""

import json

import mlx.core as mx
import pytest

from mlxrl_runs import compose, train
from mlxrl_runs.errors import TrainingError

SMALL = ["tracking=jsonl", "trainer.evaluation_episodes=80", "env=arithmetic", "algorithm=grpo", "tasks_per_step=8"]


def latest(folder):
    return (folder / "latest").resolve()


def test_a_collapse_stops_the_run_and_keeps_the_best_policy(tmp_path, capsys):
    too_much = ["steps=40", "optimizer.learning_rate=0.004", "optimizer.warmup_steps=40", "trainer.eval_every=1"]
    config = compose([*SMALL, f"paths.output={tmp_path}", *too_much, "rollout.max_completion_tokens=12"])
    with pytest.raises(TrainingError, match=r"Collapsed at step \d+: .*fell to .*Lower optimizer.learning_rate"):
        train(config)
    run = latest(tmp_path)
    record = json.loads((run / "run.json").read_text())
    assert record["state"] == "failed" and "Collapsed" in record["error"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = {row["step"]: row["eval/greedy_success"] for row in rows[1:]}
    [kept] = (run / "checkpoints").iterdir()
    best = max(scores, key=lambda step: (scores[step], -step))
    assert kept.name == f"step_{best:06d}"  # superseded ones are gone
    saved, final = (mx.load(str(folder / "adapters.safetensors")) for folder in (kept, run / "adapters"))
    assert saved.keys() == final.keys() and all(mx.array_equal(saved[name], final[name]) for name in saved)
    assert f"policy of step {best}" in record["error"]


def test_a_guard_that_is_off_stops_nothing(tmp_path):
    careless = ["optimizer.learning_rate=0.5", "trainer.collapse_guard.enabled=false", "trainer.eval_every=1"]
    config = compose([*SMALL, f"paths.output={tmp_path}", "steps=3", *careless])
    assert len(train(config).metrics) == 4


def test_a_warm_start_is_reported_apart(tmp_path, capsys):
    warm = ["trainer.warm_start.steps=8", "trainer.warm_start.actions=random", "trainer.evaluation_episodes=64"]
    config = compose(["tracking=jsonl", f"paths.output={tmp_path}", "steps=2", "tasks_per_step=4", *warm])
    run = train(config)
    assert set(run.evaluation) == {"before", "after", "warm_start"}
    first, *others = run.metrics
    assert first["warm_start/steps"] == 8
    assert first["warm_start/last_cross_entropy"] < first["warm_start/first_cross_entropy"]
    assert first["warm_start/sampled_success"] == run.evaluation["warm_start"]["sampled"]["success"]
    assert first["eval/sampled_success"] == run.evaluation["before"]["sampled"]["success"]
    assert not any(name.startswith("warm_start") for row in others for name in row)
    assert others[0]["kl/reference"] == pytest.approx(0, abs=1e-6)  # the reference is the policy RL begins with
    assert others[0]["progress/optimizer_updates"] == 1
    out = capsys.readouterr().out
    assert "warm start: cross-entropy" in out and "after the warm start" in out and "before training" in out


def test_named_rewards_reach_the_log_the_episodes_and_the_evaluation(tmp_path):
    measured = "+reward.first={name: numeric, which: first, weight: 0, tolerance: 0}"
    config = compose([*SMALL, f"paths.output={tmp_path}", "steps=1", "reward=[numeric,length,truncated]", measured])
    run = train(config)
    row = run.metrics[1]
    weighted = row["reward/numeric"] + 0.1 * row["reward/length"] + 0.1 * row["reward/truncated"]
    assert row["reward/mean"] == pytest.approx(weighted, abs=1e-6)
    assert row["reward/success"] == pytest.approx(row["reward/numeric"])
    parts = {"numeric", "length", "truncated", "first"}
    assert set(run.trajectories[0]["turns"][0]["reward_parts"]) == parts
    assert set(run.evaluation["after"]["greedy"]["parts"]) == parts
    assert run.evaluation["after"]["oracle"]["success"] == 1.0  # <solution> holds the right last number


def test_the_answer_prefix_is_read_and_never_trained(tmp_path):
    prefix = ["env.answers=number", "env.answer_prefix='{problem} ='", "env.spaces=true"]
    config = compose([*SMALL, f"paths.output={tmp_path}", "steps=1", *prefix])
    run = train(config)
    turn = run.trajectories[0]["turns"][0]
    assert not turn["text"].startswith(turn["observation"])
    assert run.metrics[1]["completion/length_mean"] * 32 == pytest.approx(run.metrics[1]["progress/trained_tokens"])
