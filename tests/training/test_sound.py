"""Numbers that are not finite end a run, and what it leaves behind works."""

import json
import math

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from building import tiny, trajectory, turn
from mlxrl_runs import compose, train
from mlxrl_runs.errors import TrainingError
from mlxrl_runs.training.optimizer import LearningRate
from mlxrl_runs.training.sound import fault_of, require_finite_draws, require_usable_advantages

SHORT = ["env=arithmetic", "steps=4", "tasks_per_step=2", "trainer.evaluation_episodes=8", "tracking=jsonl"]


def advantages(low, high):
    require_usable_advantages({"advantage/min": low, "advantage/max": high}, [-3.0, 5.0], step=7)


@pytest.mark.parametrize(("low", "high"), [(0.0, math.inf), (-math.inf, 0.0), (math.nan, math.nan), (-2e15, 0.0)])
def test_advantages_that_no_gradient_survives_are_refused(low, high):
    with pytest.raises(TrainingError, match=r"advantages of step 7 .* The episodes earned -3 to 5\."):
        advantages(low, high)


def test_large_advantages_that_gradients_survive_are_not():
    advantages(-1e15, 1e15)


def test_a_token_drawn_with_no_probability_is_told_with_its_task_and_turn():
    fine = turn((10, 11), sampler_logp=(-1.0, -0.5))
    require_finite_draws([trajectory(fine, fine)], "at step 2")
    broken = turn((10, 11), sampler_logp=(-1.0, math.nan))
    with pytest.raises(TrainingError, match=r"not finite at step 2 \(task 't', turn 2\)"):
        require_finite_draws([trajectory(fine), trajectory(fine, broken)], "at step 2")


def test_a_fault_is_found_in_the_weights_and_in_what_they_compute():
    policy = tiny()
    assert fault_of(policy) is None
    name, array = next((name, array) for name, array in tree_flatten(policy.model.trainable_parameters()))
    policy.model.load_weights([(name, mx.full(array.shape, 1e30))], strict=False)
    others = [(key, mx.full(value.shape, 1e30)) for key, value in tree_flatten(policy.model.trainable_parameters())]
    policy.model.load_weights(others, strict=False)
    assert fault_of(policy) == "its log-probabilities are not finite"
    policy.model.load_weights([(name, mx.full(array.shape, mx.inf))], strict=False)
    assert fault_of(policy) == f"the weight {name} is not finite"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["trainer.save_every=1"], "The policy of step 2 is broken"),
        (["trainer.eval_every=1"], "not finite in this evaluation"),
        (["trainer.save_every=1", "algorithm.updates_per_batch=2"], "loss/policy, grad/norm not finite"),
    ],
    ids=["saving", "evaluating", "updating"],
)
def test_h21_the_last_policy_that_was_saved_takes_the_place_of_a_broken_one(tmp_path, monkeypatch, settings, says):
    updates = 2 if "algorithm.updates_per_batch=2" in settings else 1
    monkeypatch.setattr(LearningRate, "at", lambda self, update: 1e-3 if update < updates else 1e39)
    with pytest.raises(TrainingError, match=says):
        train(compose([*SHORT, f"paths.output={tmp_path}", *settings]))
    [folder] = tmp_path.glob("2*/*")
    assert json.loads((folder / "run.json").read_text())["state"] == "failed"
    [checkpoint] = folder.glob("checkpoints/step_*")
    assert checkpoint.name == "step_000001"
    kept, saved = (mx.load(str(place / "adapters.safetensors")) for place in (folder / "adapters", checkpoint))
    assert all(mx.array_equal(kept[name], saved[name]).item() for name in saved)
    warned = json.loads((folder / "summary.json").read_text())["warnings"]
    assert "that of step 1, the last one saved, is kept" in warned[-1]["text"]
