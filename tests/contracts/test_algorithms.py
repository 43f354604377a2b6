"""Promises every algorithm keeps; a new yaml in conf/algorithm is tested at once."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from building import ALGORITHMS, ENVIRONMENTS, engine_of, one_turn_batch, settings, some_requests, tiny, updater_of
from mlxrl_runs import maths
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.rollout.on_policy import group_up
from mlxrl_runs.rollout.sampling import Sampling

pytestmark = pytest.mark.parametrize("name", ALGORITHMS)


def groups_of(environment, tasks=3, members=4):
    requests = some_requests(environment, tasks, members)
    trajectories, _ = engine_of(tiny()).play(requests, Sampling())
    return group_up([request.task for request in requests[::members]], trajectories, members)


def total(algorithm, batch, logp):
    return sum(
        maths.reduction.weighted_sum(term, batch.weights).item() for term in algorithm.loss(logp, batch).values()
    )


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_it_trains_on_every_environment(name, environment):
    algorithm, policy = settings("algorithm", name), tiny()
    batch = algorithm.credit(collate(groups_of(environment)))
    report = updater_of(policy).update(algorithm, batch)
    assert report.grad_norm > 0
    assert all(isinstance(value, float) for value in algorithm.metrics(batch).values())


def test_padding_changes_nothing(name):
    algorithm = settings("algorithm", name)
    groups = groups_of("recurring")
    narrow = algorithm.credit(collate(groups))
    logp = mx.where(narrow.action_mask, narrow.sampler_logp, 0.0)
    pad = lambda array, value: mx.pad(array, [(0, 0), (0, 7)], constant_values=value)
    wide = collate(groups).with_(
        tokens=pad(narrow.tokens, 3), action_mask=pad(narrow.action_mask, False), turn_index=pad(narrow.turn_index, -1)
    )
    wide = algorithm.credit(wide)
    assert mx.array_equal(wide.advantage[:, :-7], narrow.advantage)
    # what stands in the padding is not even a number
    assert total(algorithm, wide, pad(logp, mx.nan)) == pytest.approx(total(algorithm, narrow, logp), abs=1e-6)


def test_the_order_of_groups_is_irrelevant(name):
    algorithm = settings("algorithm", name)
    groups = groups_of("recurring")
    credited = {}
    for order in (groups, groups[::-1]):
        batch = algorithm.credit(collate(order))
        for row, trajectory in enumerate(batch.trajectories):
            numbers = batch.advantage[row, : len(trajectory.tokens)].tolist()
            credited.setdefault((trajectory.task, trajectory.member), []).append(numbers)
    assert all(first == pytest.approx(second, abs=1e-6) for first, second in credited.values())


def test_equal_returns_pay_nothing(name):
    batch = settings("algorithm", name).credit(one_turn_batch([[0.3] * 4, [0.1] * 4]))
    assert mx.abs(batch.advantage).max().item() == 0


def test_advantages_of_a_group_sum_to_zero_and_follow_its_ranking(name):
    batch = settings("algorithm", name).credit(one_turn_batch([[0.0, 1.0, 2.0, 5.0]]))
    row_advantage = batch.advantage.max(axis=1) + batch.advantage.min(axis=1)  # one value a row, 0 elsewhere
    assert row_advantage.sum().item() == pytest.approx(0, abs=1e-5)
    assert row_advantage.tolist() == sorted(row_advantage.tolist())


def test_context_is_never_trained(name):
    algorithm, policy = settings("algorithm", name), tiny()
    batch = algorithm.credit(collate(groups_of("recurring")))
    assert mx.where(batch.action_mask, 0.0, mx.abs(batch.weights)).max().item() == 0
    assert mx.where(batch.action_mask, 0.0, mx.abs(batch.advantage)).max().item() == 0
    del policy


def test_h08_only_sampled_tokens_are_trained_and_an_old_answer_in_the_prompt_moves_no_mask(name):
    from building import trajectory, turn

    batches = []
    for old_answer in (4, 9):
        members = [
            trajectory(turn([7, 2], reward, context=[1, 3, old_answer, 2]), member=i) for i, reward in enumerate((1, 0))
        ]
        batches.append(settings("algorithm", name).credit(collate([Group("t", tuple(members))])))
    assert batches[0].action_mask.sum().item() == 4
    assert mx.array_equal(batches[0].action_mask, batches[1].action_mask)
    assert mx.array_equal(batches[0].advantage, batches[1].advantage)


def test_h23_an_empty_completion_trains_its_end_token_counts_in_the_baseline_and_gives_no_nan(name):
    from building import trajectory, turn

    members = [trajectory(turn([2], 10.0)), trajectory(turn([7, 8, 2], 0.0), member=1)]
    algorithm, policy = settings("algorithm", name), tiny()
    batch = algorithm.credit(collate([Group("t", tuple(members))]))
    assert batch.advantage[0].tolist()[:2] == [0, 0] and batch.advantage[0, 2].item() > 0
    assert batch.advantage[0, 3:].tolist() == [0, 0]
    report = updater_of(policy).update(algorithm, batch)
    assert mx.isfinite(mx.array(report.grad_norm)).item()


def test_its_reference_pass_is_asked_for_only_when_the_loss_reads_it(name):
    assert not settings("algorithm", name).needs_reference
    assert settings("algorithm", name, kl_coef=0.1).needs_reference


def test_the_gradient_of_the_loss_is_the_policy_gradient(name):
    # at ratio 1 the gradient of the surrogate by logp is -A w
    algorithm = settings("algorithm", name)
    batch = algorithm.credit(collate(groups_of("recurring")))
    loss = lambda logp: maths.reduction.weighted_sum(algorithm.loss(logp, batch)["policy"], batch.weights)
    gradient = mx.grad(loss)(batch.sampler_logp)
    assert mx.abs(gradient + batch.advantage * batch.weights).max().item() < 1e-7
    assert tree_flatten(gradient)
