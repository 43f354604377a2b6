"""The optimizer step: exact micro-batches, no pass that nobody asked for, and nothing non-finite in the weights."""

import math
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from building import (
    ALGORITHMS,
    UNTAUGHT,
    engine_of,
    one_turn_batch,
    scored,
    settings,
    some_requests,
    tiny,
    tiny_for,
    updater_of,
)
from mlxrl_runs.core.batch import collate
from mlxrl_runs.errors import TrainingError
from mlxrl_runs.rollout.on_policy import group_up
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.training.metrics import update_metrics
from mlxrl_runs.training.optimizer import LearningRate, make_optimizer
from mlxrl_runs.training.score import score


def rolled_out(policy, environment="recurring", tasks=3, members=4):
    requests = some_requests(environment, tasks, members)
    trajectories, _ = engine_of(policy).play(requests, Sampling())
    return collate(group_up([request.task for request in requests[::members]], trajectories, members))


def weights_of(policy):
    return {name: mx.array(array) for name, array in tree_flatten(policy.model.trainable_parameters())}


def gap(one, other):
    return max(mx.abs(one[name] - other[name]).max().item() for name in one)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum", "fixed_length"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_h04_micro_batches_add_up_to_the_whole_for_every_reduction(name, reduction):
    # every term of the loss at once
    terms = {"kl_coef": 0.1, "entropy_coef": 0.01, "echo_coef": 0.1, "mismatch_correction": "truncate"}
    algorithm = settings("algorithm", name, reduction=reduction, **terms)
    policy = tiny_for(algorithm)
    batch = algorithm.credit(scored(policy, rolled_out(policy), algorithm))
    losses, gradients = [], []
    for rows in (0, 1, 5):
        report, gradient = updater_of(policy, rows=rows)._gradient(algorithm, batch)
        losses.append(report.losses)
        gradients.append(dict(tree_flatten(gradient)))
    size = max(mx.abs(array).max().item() for array in gradients[0].values())
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        assert loss == pytest.approx(losses[0], abs=1e-5)
        assert gap(gradients[0], gradient) < 1e-5 * max(size, 1)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_h06_one_step_moves_lora_b_when_rewards_differ_and_not_at_all_when_they_are_equal(name):
    algorithm = settings("algorithm", name, **UNTAUGHT.get(name, {}))
    for returns, moves in (([1.0, 0.0, 0.0, 1.0], True), ([1.0] * 4, False)):
        policy = tiny_for(algorithm)
        batch = algorithm.credit(scored(policy, one_turn_batch([returns, returns], lengths=[1, 2, 3, 4]), algorithm))
        updater_of(policy).update(algorithm, batch)
        largest = max(mx.abs(a).max().item() for n, a in weights_of(policy).items() if n.endswith("lora_b"))
        assert (largest > 0) is moves


def test_h05_the_policy_loss_of_each_reduction_is_the_one_worked_by_hand():
    # advantages +-.7071 of a pair, token counts 1 and 3, ratio 1:
    # token mean (-a + 3a) / 4 = a / 2; sequence mean (-a + a) / 2 = 0; fixed length 4: (-a + 3a) / (2 x 4) = a / 4
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    batch = one_turn_batch([[1.0, 0.0]], lengths=[1, 3])
    for reduction, expected in (("token_mean", a / 2), ("sequence_mean", 0.0), ("fixed_length", a / 4)):
        algorithm = settings("algorithm", "grpo", reduction=reduction, reduction_length=4)
        report, _ = updater_of(tiny())._gradient(algorithm, algorithm.credit(batch))
        assert report.losses["policy"] == pytest.approx(expected, abs=1e-6)


def test_one_optimizer_step_a_batch_needs_no_old_pass_and_several_report_their_ratios():
    policy = tiny()
    batch = rolled_out(policy)
    once = settings("algorithm", "grpo")
    report = updater_of(policy).update(once, once.credit(batch))
    assert report.ratio_metrics == {}
    thrice = settings("algorithm", "grpo", updates_per_batch=3)
    updater = updater_of(policy)
    scored = score(policy, batch, 1.0, old=True, reference=False, rows=0)
    report = updater.update(thrice, thrice.credit(scored))
    assert updater.updates == 3
    assert set(report.ratio_metrics) == {
        "ratio/mean", "ratio/max", "clip/low_fraction", "clip/high_fraction", "kl/old",
    }  # fmt: skip
    assert report.ratio_metrics["kl/old"] > 0 and report.ratio_metrics["ratio/max"] > 1


def test_the_first_of_several_updates_equals_the_only_one():
    one, several = settings("algorithm", "gigpo"), settings("algorithm", "gigpo", updates_per_batch=2)
    policy = tiny()
    batch = rolled_out(policy)
    scored = score(policy, batch, 1.0, old=True, reference=False, rows=0)
    _, alone = updater_of(policy)._gradient(one, one.credit(batch))
    _, first = updater_of(policy)._gradient(several, several.credit(scored))
    assert gap(dict(tree_flatten(alone)), dict(tree_flatten(first))) < 1e-6


def test_h21_a_number_that_is_not_finite_never_reaches_the_weights():
    algorithm = settings("algorithm", "grpo")
    policy = tiny()
    batch = algorithm.credit(rolled_out(policy))
    poisoned = batch.with_(advantage=mx.where(batch.action_mask, mx.nan, batch.advantage))
    updater = updater_of(policy, max_nonfinite=1)
    before = weights_of(policy)
    updater.update(algorithm, poisoned)
    assert (updater.skipped, updater.updates) == (1, 0)
    assert gap(before, weights_of(policy)) == 0
    with pytest.raises(TrainingError, match=r"loss/policy, grad/norm not finite at optimizer step 1"):
        updater.update(algorithm, poisoned)
    assert gap(before, weights_of(policy)) == 0
    updater.update(algorithm, batch)
    assert updater.updates == 1 and gap(before, weights_of(policy)) > 0


def test_a_huge_reward_is_caught_by_the_gradient_norm():
    algorithm = settings("algorithm", "grpo", advantage_scaling="none")
    policy = tiny()
    batch = algorithm.credit(one_turn_batch([[3e38, -3e38]]))
    with pytest.raises(TrainingError, match="not finite"):
        updater_of(policy).update(algorithm, batch)


def test_gradients_are_clipped_to_the_norm_and_the_norm_is_logged_before():
    algorithm = settings("algorithm", "grpo")
    policy = tiny()
    batch = algorithm.credit(rolled_out(policy))
    seen = []
    for limit in (None, 1e-3):
        updater = updater_of(tiny(), max_grad_norm=limit)
        updater.optimizer.update = lambda model, gradient: seen.append(dict(tree_flatten(gradient)))
        report = updater.update(algorithm, batch)
    norm = lambda gradient: math.sqrt(sum(array.square().sum().item() for array in gradient.values()))
    assert norm(seen[0]) == pytest.approx(report.grad_norms["policy"], rel=1e-4)
    assert norm(seen[1]) == pytest.approx(1e-3, rel=1e-4)


def test_adam_takes_its_first_step_at_full_length():
    # bias corrected, |first step| = learning rate wherever the gradient is not 0
    algorithm = settings("algorithm", "grpo")
    policy = tiny()
    before = weights_of(policy)
    updater_of(policy, learning_rate=0.01).update(algorithm, algorithm.credit(rolled_out(policy)))
    assert gap(before, weights_of(policy)) == pytest.approx(0.01, rel=1e-3)


def test_adamw_shrinks_weights_that_no_gradient_moves():
    # equal rewards: no gradient, and each weight loses learning_rate x weight_decay of itself; adam keeps it
    algorithm = settings("algorithm", "grpo")
    for name, left in (("adam", 1.0), ("adamw", 1 - 0.01 * 0.5)):
        policy = tiny()
        before = weights_of(policy)
        updater = updater_of(policy, learning_rate=0.01)
        optimizer = make_optimizer(name, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
        updater.learners["policy"] = replace(updater.learners["policy"], optimizer=optimizer)
        updater.update(algorithm, algorithm.credit(one_turn_batch([[1.0, 1.0]])))
        assert gap({weight: array * left for weight, array in before.items()}, weights_of(policy)) < 1e-7


def test_answers_of_the_environment_are_measured_where_echo_trains_on_them():
    policy, algorithm = tiny(), settings("algorithm", "grpo", echo_coef=0.1)
    batch = rolled_out(policy)
    expected = mx.pad(mx.argmax(policy.model(batch.tokens)[:, :-1], axis=-1), [(0, 0), (1, 0)])
    # some of the answers are made what the model expects; what it then expects behind them is found again
    batch = batch.with_(tokens=mx.where(batch.observation_mask, expected, batch.tokens))
    credited = algorithm.credit(batch)
    metrics = update_metrics(credited, updater_of(policy, learning_rate=0.0).update(algorithm, credited))
    logits = policy.model(batch.tokens)[:, :-1]
    right = (mx.argmax(logits, axis=-1) == batch.tokens[:, 1:]) & batch.observation_mask[:, 1:]
    assert 0 < metrics["echo/accuracy"] == pytest.approx(right.sum().item() / batch.observation_mask.sum().item())
    assert metrics["loss/echo"] == pytest.approx(0.1 * metrics["echo/cross_entropy"], rel=1e-4)
    plain = settings("algorithm", "grpo")
    report = updater_of(policy).update(plain, plain.credit(batch))
    assert not [name for name in update_metrics(plain.credit(batch), report) if name.startswith("echo/")]


def test_the_learning_rate_warms_up_and_comes_down():
    rate = lambda schedule, step: LearningRate(1.0, schedule, 2, 12, 0.1).at(step)
    assert [rate("linear", step) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert rate("constant", 500) == 1.0
    assert rate("linear", 7) == pytest.approx(0.55)  # half way from 1 to .1
    assert rate("cosine", 7) == pytest.approx(0.55)
    assert rate("cosine", 12) == rate("linear", 99) == pytest.approx(0.1)


def test_h03_the_kl_term_pulls_the_policy_back_to_its_reference():
    algorithm = settings("algorithm", "grpo", kl_coef=1.0)
    policy = tiny()
    flat = one_turn_batch([[1.0, 1.0], [0.0, 0.0]])  # no advantage: only the KL acts
    batch = algorithm.credit(score(policy, flat, 1.0, old=False, reference=True, rows=0))
    report = updater_of(policy).update(algorithm, batch)
    assert report.losses["kl"] == 0.0 and report.grad_norms["policy"] == 0.0  # policy = reference
    for name, array in tree_flatten(policy.model.trainable_parameters()):
        push = 0.05 * mx.random.normal(array.shape, key=mx.random.key(len(name)))
        policy.model.load_weights([(name, array + push)], strict=False)
    updater, seen = updater_of(policy, learning_rate=1e-3), []
    for _ in range(10):
        seen.append(updater.update(algorithm, batch).losses["kl"])
    assert seen[0] > 0 and seen[-1] < 0.5 * seen[0]


def test_minibatches_deal_whole_groups_and_every_row_once_a_visit():
    algorithm = settings("algorithm", "grpo", minibatches=3, updates_per_batch=2)
    policy = tiny()
    batch = algorithm.credit(scored(policy, rolled_out(policy, tasks=5), algorithm))
    updater = updater_of(policy)
    for visit in (0, 1):
        dealt = list(updater._deal(algorithm, batch, visit))
        assert sorted(row for rows in dealt for row in rows) == list(range(batch.rows))
        groups = [{batch.group_index[row] for row in rows} for rows in dealt]
        assert len(groups) == 3 and sum(map(len, groups)) == 5  # no group in two of them
    report = updater.update(algorithm, batch)
    assert updater.updates == 6
    # rows come back in the batch's order: those of the first minibatch were met by the policy that was scored
    first = next(iter(updater._deal(algorithm, batch, 0)))
    apart = mx.abs(report.outputs.logp - batch.old_logp).max(axis=1)
    assert max(apart[row].item() for row in first) < 1e-5 < apart.max().item()


def test_a_minibatch_is_weighed_by_itself():
    algorithm = settings("algorithm", "grpo", minibatches=2)
    batch = algorithm.credit(one_turn_batch([[1.0, 0.0]] * 4))
    half = algorithm.weigh(batch.select_rows([0, 1, 4, 5]))
    assert batch.weights.sum().item() == pytest.approx(1) and half.weights.sum().item() == pytest.approx(1)
    assert (
        half.group_index == (0, 0, 2, 2) and half.advantage.tolist() == batch.advantage[mx.array([0, 1, 4, 5])].tolist()
    )


def test_a_policy_that_has_moved_too_far_gets_no_more_steps_on_a_batch():
    for limit, updates in ((1e-9, 1), (1e9, 3)):
        algorithm = settings("algorithm", "grpo", updates_per_batch=3, kl_stop=limit)
        policy = tiny()
        batch = algorithm.credit(scored(policy, rolled_out(policy), algorithm))
        updater = updater_of(policy)
        report = updater.update(algorithm, batch)
        assert (updater.updates, report.stopped_early) == (updates, updates < 3)
        assert report.trained_tokens == updates * batch.action_mask.sum().item()


def test_a_token_that_is_masked_is_no_trained_token():
    algorithm = settings("algorithm", "grpo", updates_per_batch=2, mask_longer_than=2)
    batch = algorithm.credit(one_turn_batch([[1.0, 0.0]] * 2, lengths=[2, 3]))
    batch = batch.with_(old_logp=batch.sampler_logp)
    assert updater_of(tiny()).update(algorithm, batch).trained_tokens == 2 * 4


def test_a_skipped_update_trains_no_token():
    algorithm = settings("algorithm", "grpo")
    batch = algorithm.credit(one_turn_batch([[1.0, 0.0]] * 2))
    broken = batch.with_(advantage=batch.advantage * mx.nan)
    assert updater_of(tiny(), max_nonfinite=1).update(algorithm, broken).trained_tokens == 0


def test_a_value_head_learns_at_its_own_rate_and_is_bounded_apart():
    algorithm = settings("algorithm", "ppo", updates_per_batch=1)
    policy = tiny_for(algorithm)
    batch = algorithm.credit(scored(policy, rolled_out(policy), algorithm))
    before = weights_of(policy)
    updater = updater_of(policy, learning_rate=0.0, value_learning_rate=LearningRate(0.01, "constant", 0, 10, 0.1))
    report = updater.update(algorithm, batch)
    assert gap(before, weights_of(policy)) == 0
    assert mx.abs(policy.value_head.weight).max().item() == pytest.approx(0.01, rel=1e-3)
    assert set(report.grad_norms) == {"policy", "value"} and report.grad_norms["value"] > 0


def test_the_value_loss_reaches_the_model_only_by_the_share_it_is_given():
    shares = {}
    for share in (0.0, 0.5, 1.0):
        algorithm = settings("algorithm", "ppo", value_gradient=share)
        policy = tiny_for(algorithm)
        policy.value_head.weight = mx.ones(policy.value_head.weight.shape)
        batch = algorithm.credit(scored(policy, rolled_out(policy), algorithm))
        batch = batch.with_(advantage=mx.zeros(batch.tokens.shape))  # what is left is the value loss
        _, gradient = updater_of(policy)._gradient(algorithm, batch)
        shares[share] = math.sqrt(sum(array.square().sum().item() for _, array in tree_flatten(gradient["policy"])))
    assert shares[0.0] == 0 and shares[1.0] > 1e-4
    assert shares[0.5] == pytest.approx(0.5 * shares[1.0], rel=1e-3)


def test_values_are_read_where_they_belong_and_behind_the_last_token_too():
    policy = tiny()
    policy.add_value_head()
    policy.value_head.weight = mx.random.normal(policy.value_head.weight.shape, key=mx.random.key(1))
    batch = score(policy, rolled_out(policy), 1.0, old=False, reference=False, values=True, rows=5)
    hidden = policy.value_head(policy.model.model(batch.tokens))
    before = mx.pad(hidden[:, :-1], [(0, 0), (1, 0)])  # what stands before a token judges it
    apart = mx.where(batch.action_mask, mx.abs(before - batch.values), 0.0)
    assert apart.max().item() < 1e-4
    ends = mx.take_along_axis(hidden, batch.lengths[:, None] - 1, axis=1).squeeze(-1)
    assert mx.abs(ends - batch.final_values).max().item() < 1e-4
