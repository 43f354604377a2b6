"""DAPO's batches: refilled where groups do not disagree, and an end in plain words where none ever does."""

import json

import pytest

from mlxrl_runs import compose, train
from mlxrl_runs.errors import TrainingError

# Pays by what the model wrote in `share` of the tasks, and the same whatever it wrote in the others.
FILE = """
from mlxrl_runs.core.protocols import StepResult
class Letters:
    max_turns = 1
    def __init__(self, task, share, success):
        self.task, self.share, self.success = task, share, success
    def reset(self): return self.task
    def step(self, action):
        judged = int(self.task) % 10 < 10 * self.share
        return StepResult("", float(len(action) % 2) if judged else 0.5, True, {"success": self.success})
    def state_id(self, observation): return self.task
def factory(share, success):
    return lambda task, seed, group_index: Letters(task, share, success)
some, none, solved = factory(0.3, 0.0), factory(0.0, 0.0), factory(0.0, 1.0)
"""


@pytest.fixture
def overrides(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    return [
        "algorithm=dapo", "env=python", f"env.file={tmp_path / 'mine.py'}", "steps=2", "tasks_per_step=8",
        "trainer.evaluation_episodes=8", "rollout.max_completion_tokens=8", "tracking=jsonl",
        f"paths.output={tmp_path / 'out'}",
    ]  # fmt: skip


def test_with_seventy_percent_of_groups_without_spread_the_batch_is_full_and_the_cost_is_told(overrides):
    run = train(compose([*overrides, "env.factory=some"]))
    for step in (1, 2):
        metrics = run.metrics[step]
        assert metrics["refill/kept_groups"] == 8 and metrics["refill/rounds"] >= 1
        assert 0.4 < metrics["group/zero_std_fraction"] < 0.95
        dropped = metrics["refill/sampled_groups"] - 8
        assert dropped > 0 and metrics["refill/unused_tokens"] >= dropped * 4
    assert run.metrics[2]["progress/sampled_tokens"] > run.metrics[2]["progress/trained_tokens"]


def test_where_no_group_ever_disagrees_the_run_ends_and_says_why(overrides):
    with pytest.raises(TrainingError, match=r"all 24 groups of 3 rounds .* without spread .* algorithm.max_refills=0"):
        train(compose([*overrides, "env.factory=none", "algorithm.max_refills=2"]))


def test_where_no_group_disagrees_because_all_are_right_the_run_is_done(overrides, tmp_path):
    train(compose([*overrides, "env.factory=solved", "algorithm.max_refills=1"]))
    [folder] = [path.parent for path in (tmp_path / "out").glob("*/*/run.json")]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["state"] == "finished" and "the tasks are solved" in summary["stopped"]
    assert json.loads((folder / "evaluation.json").read_text())["after"]["sampled"]["success"] == 1


def test_without_refills_whatever_comes_is_trained_on(overrides):
    run = train(compose([*overrides, "env.factory=none", "algorithm.max_refills=0", "steps=1"]))
    assert run.metrics[1]["refill/kept_groups"] == 8 and run.metrics[1]["grad/norm"] == 0
