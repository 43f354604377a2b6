"""Promises every algorithm keeps; a new yaml in conf/algorithm is tested at once."""

from dataclasses import replace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from building import (
    ALGORITHMS,
    ENVIRONMENTS,
    UNTAUGHT,
    engine_of,
    one_turn_batch,
    scored,
    settings,
    some_requests,
    tiny,
    tiny_for,
    trajectory,
    turn,
    updater_of,
)
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.outputs import TokenOutputs
from mlxrl_runs.core.trajectory import Group, StopReason
from mlxrl_runs.rollout.on_policy import group_up
from mlxrl_runs.rollout.sampling import Sampling

SMALL = 2e-3  # how far the weights are moved for a finite difference, in the direction's own length

pytestmark = pytest.mark.parametrize("name", ALGORITHMS)


def groups_of(environment, tasks=3, members=4):
    requests = some_requests(environment, tasks, members)
    trajectories, _ = engine_of(tiny()).play(requests, Sampling())
    return group_up([request.task for request in requests[::members]], trajectories, members)


def outputs_of(logp, batch):
    """As from a forward pass that found these log-probabilities, and whatever values the batch has."""
    return TokenOutputs(logp, mx.ones_like(logp), logp > -1, batch.values)


def total(algorithm, batch, logp):
    return sum(algorithm.loss(outputs_of(logp, batch), batch).values()).item()


def credited(algorithm, batch, policy=None):
    """With the passes that the algorithm asks for; rows made by hand are scored by the tiny model as well."""
    return algorithm.credit(scored(policy or tiny_for(algorithm), batch, algorithm))


def has_group_baseline(algorithm):
    return algorithm.minimum_group_size > 1


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_it_trains_on_every_environment(name, environment):
    algorithm = settings("algorithm", name)
    policy = tiny_for(algorithm)
    batch = credited(algorithm, collate(groups_of(environment)), policy)
    report = updater_of(policy).update(algorithm, batch)
    assert report.grad_norms["policy"] > 0
    assert all(isinstance(value, float) for value in algorithm.metrics(batch).values())


def test_padding_changes_nothing(name):
    algorithm = settings("algorithm", name)
    narrow = credited(algorithm, collate(groups_of("recurring")))
    logp = mx.where(narrow.action_mask, narrow.sampler_logp - 0.1, 0.0)
    pad = lambda array, value: None if array is None else mx.pad(array, [(0, 0), (0, 7)], constant_values=value)
    # what stands in the padding is not even a number
    wide = narrow.with_(
        tokens=pad(narrow.tokens, 3), action_mask=pad(narrow.action_mask, False), turn_index=pad(narrow.turn_index, -1),
        observation_mask=pad(narrow.observation_mask, False), sampler_logp=pad(narrow.sampler_logp, mx.nan),
        old_logp=pad(narrow.old_logp, mx.nan), values=pad(narrow.values, mx.nan), advantage=None, returns=None,
    )  # fmt: skip
    wide = algorithm.credit(wide)
    assert mx.allclose(wide.advantage[:, :-7], narrow.advantage, atol=1e-6)
    assert total(algorithm, wide, pad(logp, mx.nan)) == pytest.approx(total(algorithm, narrow, logp), abs=1e-6)


def test_the_order_of_groups_is_irrelevant(name):
    algorithm = settings("algorithm", name)
    groups, policy = groups_of("recurring"), tiny_for(algorithm)
    found = {}
    for order in (groups, groups[::-1]):
        batch = credited(algorithm, collate(order), policy)
        for row, episode in enumerate(batch.trajectories):
            numbers = batch.advantage[row, : len(episode.tokens)].tolist()
            found.setdefault((episode.task, episode.member), []).append(numbers)
    assert all(first == pytest.approx(second, abs=1e-5) for first, second in found.values())


def test_equal_returns_pay_nothing(name):
    algorithm = settings("algorithm", name, **UNTAUGHT.get(name, {}))
    # without a baseline of their own groups are judged against the whole batch
    returns = [[0.3] * 4, [0.1 if has_group_baseline(algorithm) else 0.3] * 4]
    assert mx.abs(credited(algorithm, one_turn_batch(returns)).advantage).max().item() == 0


def test_advantages_of_a_group_sum_to_zero_and_follow_its_ranking(name):
    batch = credited(settings("algorithm", name), one_turn_batch([[0.0, 1.0, 2.0, 5.0]]))
    row_advantage = batch.advantage.sum(axis=1)
    assert row_advantage.sum().item() == pytest.approx(0, abs=1e-5)
    assert row_advantage.tolist() == sorted(row_advantage.tolist())
    assert row_advantage[0].item() < -0.5 and row_advantage[3].item() > 0.5


def test_context_is_never_trained(name):
    batch = credited(settings("algorithm", name), collate(groups_of("recurring")))
    assert mx.where(batch.action_mask, 0.0, mx.abs(batch.weights)).max().item() == 0
    assert mx.where(batch.action_mask, 0.0, mx.abs(batch.advantage)).max().item() == 0
    assert batch.weights.max().item() > 0


def test_h08_only_sampled_tokens_are_trained_and_an_old_answer_in_the_prompt_moves_no_mask(name):
    batches = []
    for old_answer in (4, 9):
        members = [
            trajectory(turn([7, 2], reward, context=[1, 3, old_answer, 2]), member=i) for i, reward in enumerate((1, 0))
        ]
        batches.append(credited(settings("algorithm", name), collate([Group("t", tuple(members))])))
    assert batches[0].action_mask.sum().item() == 4
    assert mx.array_equal(batches[0].action_mask, batches[1].action_mask)
    assert mx.array_equal(batches[0].advantage, batches[1].advantage)


def test_h23_an_empty_completion_trains_its_end_token_counts_in_the_baseline_and_gives_no_nan(name):
    members = [trajectory(turn([2], 10.0)), trajectory(turn([7, 8, 2], 0.0), member=1)]
    algorithm = settings("algorithm", name)
    policy = tiny_for(algorithm)
    batch = credited(algorithm, collate([Group("t", tuple(members))]), policy)
    assert batch.advantage[0].tolist()[:2] == [0, 0] and batch.advantage[0, 2].item() > 0
    assert batch.advantage[0, 3:].tolist() == [0, 0]
    report = updater_of(policy).update(algorithm, batch)
    assert mx.isfinite(mx.array(report.grad_norms["policy"])).item()


def test_its_reference_pass_is_asked_for_only_when_the_loss_reads_it(name):
    assert not settings("algorithm", name).needs.reference
    assert settings("algorithm", name, kl_coef=0.1).needs.reference


def test_the_gradient_of_the_loss_is_the_policy_gradient(name):
    # at ratio 1 the gradient of the surrogate by logp is -A w; with one ratio a row it is the mean of that over the row
    algorithm = settings("algorithm", name)
    batch = credited(algorithm, collate(groups_of("recurring")))
    at = batch.sampler_logp if batch.old_logp is None else batch.old_logp
    gradient = mx.grad(lambda logp: algorithm.loss(outputs_of(logp, batch), batch)["policy"])(at)
    assert mx.abs(gradient + batch.advantage * batch.weights).max().item() < 1e-6
    assert mx.abs(gradient).max().item() > 1e-4


def test_its_gradient_through_the_model_is_the_slope_of_its_loss(name, monkeypatch):
    """Directional finite differences, with every term that an algorithm can have, away from ratio 1."""
    terms = {"kl_coef": 0.1, "entropy_coef": 0.05, "echo_coef": 0.1, "mismatch_correction": "truncate"}
    algorithm = settings("algorithm", name, updates_per_batch=2, **terms)
    policy = tiny_for(algorithm)
    batch = credited(algorithm, collate(groups_of("recurring")), policy)
    updater = updater_of(policy, learning_rate=2e-3)
    updater._apply(*updater._gradient(algorithm, batch))  # away from the policy that was scored
    report, gradient = updater._gradient(algorithm, batch)
    if name == "cispo":  # its ratio is a constant for the gradient
        constant = algorithm.ratio(report.outputs.logp, batch)
        monkeypatch.setattr(type(algorithm), "ratio", lambda *_: constant)
    assert set(report.losses) >= {"policy", "kl", "entropy", "echo"}
    flat = dict(tree_flatten(gradient))
    directions = {n: mx.random.normal(a.shape, key=mx.random.key(i)) for i, (n, a) in enumerate(sorted(flat.items()))}
    slope = sum((flat[n] * directions[n]).sum() for n in flat).item()
    here = {n: mx.array(a) for n, a in tree_flatten(updater._trained.trainable_parameters())}

    def loss_at(distance):
        updater._trained.load_weights([(n, here[n] + distance * directions[n]) for n in here], strict=False)
        return sum(updater._gradient(algorithm, batch)[0].losses.values())

    measured = (loss_at(SMALL) - loss_at(-SMALL)) / (2 * SMALL)
    assert measured == pytest.approx(slope, rel=1e-2, abs=1e-4)


def test_what_is_not_trained_leaves_every_denominator(name):
    algorithm = settings("algorithm", name, mask_longer_than=3)
    batch = credited(algorithm, one_turn_batch([[1.0, 0.0]] * 2, lengths=[2, 4]))
    alone = credited(algorithm, one_turn_batch([[1.0, 0.0]] * 2, lengths=[2, 2]))
    assert batch.weights[1].tolist() == [0] * batch.weights.shape[1]
    kept = batch.weights[0, 2].item()
    assert kept == pytest.approx(2 * alone.weights[0, 2].item())  # half of the tokens, and of the rows, are left


def test_cut_actions_are_left_out_where_that_is_asked_for(name):
    cut = replace(turn([7, 8], 1.0), stop=StopReason.LENGTH)
    members = (trajectory(cut), trajectory(turn([9, 2], 0.0), member=1))
    for asked in (True, False):
        algorithm = settings("algorithm", name, mask_truncated=asked)
        batch = credited(algorithm, collate([Group("t", members)]))
        assert (batch.weights[0].max().item() > 0) is not asked
        assert batch.weights[1].max().item() > 0
        assert batch.advantage[1, 2].item() < 0  # its reward stays in the baseline


def test_groups_without_spread_leave_the_loss_where_that_is_asked_for(name):
    algorithm = settings("algorithm", name, filter_groups=True)
    batch = credited(algorithm, one_turn_batch([[1.0, 0.0], [0.5, 0.5]]))
    assert batch.weights[2:].max().item() == 0 < batch.weights[:2].max().item()


def test_a_kl_in_the_reward_lowers_what_drifted_from_the_reference(name):
    algorithm = settings("algorithm", name, kl_coef=1.0, kl_in="reward", kl_estimator="k1")
    assert algorithm.needs.old
    batch = one_turn_batch([[1.0, 1.0]])
    drift = mx.where(mx.arange(2)[:, None] == 0, batch.action_mask * 0.5, 0.0)  # the first row, by half a nat a token
    nothing = mx.zeros(batch.tokens.shape)
    values = {"values": nothing, "final_values": mx.zeros(2)} if algorithm.needs.values else {}
    batch = algorithm.credit(batch.with_(old_logp=drift, reference_logp=nothing, **values))
    assert batch.advantage[0, 2].item() < 0 < batch.advantage[1, 2].item()
    terms = algorithm.loss(outputs_of(drift, batch), batch)
    assert "kl" not in terms
