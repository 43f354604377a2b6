"""Layers that forget what is inside them: the same gradient, less memory, and no other model touched."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from building import engine_of, settings, some_requests, tiny, trajectory, turn, updater_of
from families import FAMILIES, small_model
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.memory.checkpointing import checkpointed
from mlxrl_runs.policy import forward
from mlxrl_runs.policy.adapters import add_adapter
from mlxrl_runs.policy.forward import token_outputs
from mlxrl_runs.policy.load import open_policy
from mlxrl_runs.rollout.on_policy import group_up
from mlxrl_runs.rollout.sampling import Sampling


def episodes(prompts, members=4):
    """`members` rows of unequal length behind each prompt."""
    groups = []
    for number, prompt in enumerate(prompts):
        rows = [
            trajectory(turn(range(10, 13 + row), context=prompt), task=str(number), member=row)
            for row in range(members)
        ]
        groups.append(Group(str(number), tuple(rows)))
    return collate(groups)


def gradient_of(model, batch, every):
    slope = nn.value_and_grad(model, lambda module: (token_outputs(module, batch, 1.0).logp ** 2).sum())
    model.train()
    with checkpointed(model, every):
        value, gradient = slope(model)
        mx.eval(value, gradient)
    model.eval()
    return value.item(), dict(tree_flatten(gradient))


def shake(model):
    """A new adapter's B is 0, under which A has no gradient."""
    push = [(name, array + 0.1 * mx.random.normal(array.shape, key=mx.random.key(number)))
        for number, (name, array) in enumerate(tree_flatten(model.trainable_parameters()))]  # fmt: skip
    model.load_weights(push, strict=False)


def assert_equal(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, array in one[1].items():
        size = mx.abs(array).max().item()
        assert size > 0 or "lora" not in name, name
        assert mx.abs(array - other[1][name]).max().item() <= 1e-5 * size + 1e-7, name


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpointed_gradient_is_the_plain_one_in_every_family(family, kind):
    model = small_model(family)
    if kind == "lora":
        add_adapter(model, kind, rank=4, scale=4.0, dropout=0.0, targets="auto", seed=0)
        shake(model)
    batch = episodes([range(20, 32), [7, 8]])
    assert_equal(gradient_of(model, batch, 0), gradient_of(model, batch, 1))


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("share_from", [0.0, 2.0])
def test_prompts_computed_once_for_their_group_keep_their_gradient(every, share_from, monkeypatch):
    monkeypatch.setattr(forward, "SHARE_FROM", share_from)
    policy = tiny()
    shake(policy.model)
    requests = some_requests("recurring", tasks=3, members=4)
    played, _ = engine_of(policy).play(requests, Sampling())
    batch = collate(group_up(["a", "b", "c"], played, 4))
    assert_equal(gradient_of(policy.model, batch, 0), gradient_of(policy.model, batch, every))


def test_dropout_leaves_out_the_same_numbers_when_a_layer_is_computed_again():
    policy = tiny(dropout=0.5)
    shake(policy.model)
    batch = episodes([[7, 8, 9]])
    found = []
    for every in (0, 1):
        mx.random.seed(4)
        found.append((gradient_of(policy.model, batch, every), mx.random.uniform(shape=(2,)).tolist()))
    assert_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]  # what is drawn next, too


def test_an_update_checkpoints_and_makes_the_same_step():
    algorithm = settings("algorithm", "grpo")
    batch = algorithm.credit(episodes([[7, 8, 9], [5, 6]]))
    batch = batch.with_(advantage=mx.where(batch.action_mask, 1.0, 0.0))
    plain, (norm, weights) = updated(algorithm, batch, 0)
    forgetful, (same_norm, same_weights) = updated(algorithm, batch, 2)
    assert plain == [True] * 4 and forgetful == [False, True, False, True]
    assert norm > 0 and norm == pytest.approx(same_norm, rel=1e-5)
    assert max(mx.abs(array - same_weights[name]).max().item() for name, array in weights.items()) < 1e-4


def updated(algorithm, batch, every):
    """Which layers were plain while the loss was taken; and the gradient's norm and the weights of one update."""
    policy, seen = tiny(), []
    shake(policy.model)
    kind, loss = type(policy.model.layers[0]), type(algorithm).loss

    class Watched(type(algorithm)):
        def loss(self, logp, part):
            seen[:] = [type(layer) is kind for layer in policy.model.layers]
            return loss(self, logp, part)

    watched = Watched.model_validate(algorithm.model_dump())
    report = updater_of(policy, checkpoint_every=every, rows=3).update(watched, batch)
    return seen, (report.grad_norms["policy"], dict(tree_flatten(policy.model.trainable_parameters())))


def test_the_fewer_layers_remember_the_lower_the_peak_of_an_update():
    policy = open_policy(source="random", path=None, shape="1m", adapter="lora", seed=0, keep_reference=False)
    batch = episodes([range(2 + member, 200 + member) for member in range(4)], members=1)
    peaks = {}
    for every in (0, 1, 2, 0):  # none again at the end: what came before must not be what made it high
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        gradient_of(policy.model, batch, every)
        peaks[every] = mx.get_peak_memory() - before
    # of 4 layers all, 2 or none remember: 63, 45 and 34 MiB
    assert peaks[1] < 0.85 * peaks[2] and peaks[2] < 0.85 * peaks[0]


def test_another_model_of_the_process_is_left_alone_and_so_is_this_one_afterwards():
    one, other = small_model("qwen3"), small_model("qwen3")
    kind = type(one.layers[0])
    call = kind.__call__
    with checkpointed(one, 1):
        assert all(type(layer) is not kind and isinstance(layer, kind) for layer in one.layers)
        assert all(type(layer) is kind for layer in other.layers) and kind.__call__ is call
    assert all(type(layer) is kind for layer in one.layers)
    with checkpointed(one, 2):
        assert [type(layer) is kind for layer in one.layers] == [False, True]
    with pytest.raises(RuntimeError), checkpointed(one, 1):
        raise RuntimeError
    assert all(type(layer) is kind for layer in one.layers)
