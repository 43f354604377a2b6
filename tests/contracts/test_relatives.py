"""A reduced setting equals its simpler relative."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from building import (
    ENVIRONMENTS,
    engine_of,
    one_turn_batch,
    settings,
    some_requests,
    tiny,
    trajectory,
    turn,
    updater_of,
)
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.outputs import TokenOutputs
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.rollout.on_policy import group_up
from mlxrl_runs.rollout.sampling import Sampling


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_gigpo_without_its_step_part_is_grpo_bit_for_bit(environment):
    requests = some_requests(environment)
    trajectories, _ = engine_of(tiny()).play(requests, Sampling())
    batch = collate(group_up([request.task for request in requests[::4]], trajectories, 4))
    weights = []
    for algorithm in (settings("algorithm", "grpo"), settings("algorithm", "gigpo", omega=0.0)):
        policy = tiny()
        updater = updater_of(policy)
        for _ in range(3):
            updater.update(algorithm, algorithm.credit(batch))
        weights.append(dict(tree_flatten(policy.model.trainable_parameters())))
    assert all(mx.array_equal(array, weights[1][name]) for name, array in weights[0].items())


def test_the_one_turn_form_is_the_classic_completion_form():
    # rewards 1, 0 and 0, 0, 3 tokens each: A = +-.5 / (.7071 + eps), one number a completion, on every token of it
    batch = settings("algorithm", "grpo").credit(one_turn_batch([[1.0, 0.0], [0.0, 0.0]], lengths=[3, 3]))
    a = 0.5 / (0.5**0.5 + 1e-4)
    rows = batch.advantage.tolist()
    assert rows[0] == pytest.approx([0, 0, a, a, a], abs=1e-6)
    assert rows[1] == pytest.approx([0, 0, -a, -a, -a], abs=1e-6)
    assert rows[2] == rows[3] == [0] * 5
    assert batch.weights[0, 2].item() == pytest.approx(1 / 12)


def test_gigpo_judges_a_turn_by_the_other_turns_taken_in_its_state():
    # returns to go, gamma .5: in a 1 + .5 x 0 = 1 and 0 + .5 x 2 = 1, no spread; in b 0 and 2, centred -1 and +1
    one = trajectory(turn([7, 8], 1.0, "a"), turn([9, 8], 0.0, "b"))
    two = trajectory(turn([7, 8], 0.0, "a"), turn([6, 8], 2.0, "b"), member=1)
    algorithm = settings("algorithm", "gigpo", gamma=0.5, advantage_scaling="none")
    batch = algorithm.credit(collate([Group("t", (one, two))]))
    # episodes: 1 and 2, centred -.5 and +.5
    assert batch.advantage.tolist()[0] == pytest.approx([0, 0, -0.5, -0.5, 0, 0, -1.5, -1.5])
    assert batch.advantage.tolist()[1] == pytest.approx([0, 0, 0.5, 0.5, 0, 0, 1.5, 1.5])


def test_anchors_are_not_shared_between_tasks():
    groups = [
        Group(task, tuple(trajectory(turn([7], reward, "same"), task=task, member=i) for i, reward in enumerate(pair)))
        for task, pair in (("t", (1.0, 0.0)), ("u", (11.0, 10.0)))
    ]
    algorithm = settings("algorithm", "gigpo")
    metrics = algorithm.metrics(algorithm.credit(collate(groups)))
    assert metrics["anchor/group_size_mean"] == 2.0 and metrics["anchor/singleton_fraction"] == 0.0
    batch = algorithm.credit(collate(groups))
    assert batch.advantage[:, 2].tolist() == pytest.approx([1.41393, -1.41393] * 2, abs=1e-4)  # 2 x .5 / (.7071 + eps)


def rolled_out(environment="recurring"):
    requests = some_requests(environment)
    trajectories, _ = engine_of(tiny()).play(requests, Sampling())
    return collate(group_up([request.task for request in requests[::4]], trajectories, 4))


def gradient_of(algorithm, batch, logp):
    credited = algorithm.credit(batch)
    term = lambda logp: algorithm.loss(TokenOutputs(logp, logp, logp), credited)["policy"]
    return mx.grad(term)(logp)


def moved(batch):
    """Log-probabilities a little away from the sampled ones, and those as the old ones."""
    push = 0.3 * mx.random.normal(batch.tokens.shape, key=mx.random.key(3))
    return batch.with_(old_logp=batch.sampler_logp), mx.where(batch.action_mask, batch.sampler_logp + push, 0.0)


SHARED = {"reduction": "token_mean", "ratio_level": "token", "advantage_scaling": "group"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dr_grpo", SHARED),
        ("gspo", SHARED | {"clip_low": 0.2, "clip_high": 0.2}),
        ("dapo", SHARED | {"clip_high": 0.2, "overlong_penalty": 0.0, "mask_truncated": False, "filter_groups": False}),
        ("gigpo", SHARED | {"omega": 0.0}),
    ],
)
def test_with_the_keys_of_grpo_another_clipped_algorithm_has_its_gradient(name, changes):
    batch, logp = moved(rolled_out())
    grpo = gradient_of(settings("algorithm", "grpo"), batch, logp)
    assert mx.array_equal(gradient_of(settings("algorithm", name, **changes), batch, logp), grpo)
    assert mx.abs(grpo).max().item() > 1e-3
    if changes != SHARED:
        assert not mx.allclose(gradient_of(settings("algorithm", name), batch, logp), grpo, atol=1e-4)


@pytest.mark.parametrize("name", ["cispo", "sapo", "dapo"])
def test_at_ratio_one_every_policy_term_has_the_gradient_of_grpo(name):
    batch = rolled_out()
    free = {"overlong_penalty": 0.0, "mask_truncated": False, "filter_groups": False} if name == "dapo" else {}
    other = gradient_of(settings("algorithm", name, **free), batch, batch.sampler_logp)
    grpo = gradient_of(settings("algorithm", "grpo"), batch, batch.sampler_logp)
    assert mx.abs(other - grpo).max().item() < 1e-7 < mx.abs(grpo).max().item()


def test_one_ratio_a_row_is_one_a_token_where_rows_have_one_token():
    batch = one_turn_batch([[1.0, 0.0, 0.5]], lengths=[1, 1, 1]).with_(old_logp=mx.zeros((3, 3)))
    logp = mx.array([[0, 0, 0.1], [0, 0, -0.4], [0, 0, 0.5]])
    slopes = [
        gradient_of(settings("algorithm", "grpo", ratio_level=level), batch, logp).tolist()
        for level in ("token", "turn", "sequence", "sequence_product")
    ]
    assert slopes[0] == slopes[1] == slopes[2] == slopes[3]


def test_leaving_one_out_is_centring_times_g_over_g_minus_one():
    batch = rolled_out()
    rloo = settings("algorithm", "rloo").credit(batch).advantage
    centred = settings("algorithm", "dr_grpo").credit(batch).advantage
    assert mx.abs(rloo - centred * 4 / 3).max().item() < 1e-5 < mx.abs(rloo).max().item()


def test_ppo_without_anything_learned_is_reinforce_pp():
    batch = rolled_out()
    nothing = {"values": mx.zeros(batch.tokens.shape), "final_values": mx.zeros(batch.rows)}
    keys = {"gamma": 0.9}
    ppo = settings("algorithm", "ppo", gae_lambda=1.0, **keys).credit(batch.with_(**nothing)).advantage
    other = settings("algorithm", "reinforce_pp", **keys).credit(batch).advantage
    assert mx.abs(ppo - other).max().item() < 1e-5 < mx.abs(other).max().item()
