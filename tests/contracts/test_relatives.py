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
