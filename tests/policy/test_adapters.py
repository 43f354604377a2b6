"""Adapters on every kind of layer: what learns, what stays, and the base behind them."""

import json
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from building import base_hash, engine_of, one_turn_batch, settings, some_requests, tiny, updater_of
from families import FAMILIES, MIXTURES, small_model
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.policy.adapters import adapters_off, add_adapter
from mlxrl_runs.policy.load import TINY, open_policy
from mlxrl_runs.policy.precision import with_precision
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.training.score import score

PROMPT = mx.array([[7, 8, 9, 10, 11, 12, 13, 14]])
SETTINGS = {"rank": 4, "scale": 4.0, "dropout": 0.0, "targets": "auto", "seed": 0}


def learn(model, steps=2):
    """A few steps of plain language modelling on the prompt; twice, because A moves only once B has."""

    def loss_of(model):
        return nn.losses.cross_entropy(model(PROMPT[:, :-1]), PROMPT[:, 1:]).mean()

    optimizer = optim.Adam(1e-2)
    model.train()
    for _ in range(steps):
        loss, gradient = nn.value_and_grad(model, loss_of)(model)
        optimizer.update(model, gradient)
        mx.eval(loss, model.parameters(), optimizer.state)
    model.eval()


@pytest.mark.parametrize("precision", ["float32", "4bit"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_its_adapter_alone_and_shows_its_base_when_it_is_off(family, kind, precision):
    model, _ = with_precision(small_model(family), {}, precision)
    base = model(PROMPT)
    add_adapter(model, kind, **SETTINGS)
    model.eval()
    assert mx.abs(model(PROMPT) - base).max().item() < 1e-4  # DoRA divides by a norm it took itself
    before, frozen = dict(tree_flatten(model.trainable_parameters())), base_hash(model)
    learn(model)
    after = dict(tree_flatten(model.trainable_parameters()))
    still = [name for name in before if mx.array_equal(before[name], after[name])]
    # an expert that no token of eight went to has no gradient, yet its neighbours in the array move
    assert not still
    assert base_hash(model) == frozen
    assert not mx.array_equal(model(PROMPT), base)
    with adapters_off(model):
        assert mx.array_equal(model(PROMPT), base)
    assert dict(tree_flatten(model.trainable_parameters())).keys() == after.keys()


@pytest.mark.parametrize("family", MIXTURES)
def test_auto_adapts_experts_and_leaves_routers_alone_and_all_takes_them_too(family):
    def names(kind="lora", targets="auto"):
        config = add_adapter(small_model(family), kind, **SETTINGS | {"targets": targets})
        return set(config["lora_parameters"]["keys"])

    routers = {"mlp.gate", "mlp.shared_expert_gate"} if family == "qwen3_next" else {"mlp.gate"}
    assert "mlp.switch_mlp.gate_proj" in names() and not routers & names()
    assert names(targets="all") - names() == routers
    assert names(targets=["gate_proj"]) == {name for name in names() if name.endswith("gate_proj")}
    assert not any("switch_mlp" in name for name in names("dora"))


def test_a_dense_layer_that_is_called_gate_is_no_router():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [Block()]

    assert add_adapter(Model(), "lora", **SETTINGS)["lora_parameters"]["keys"] == ["gate", "up"]


def test_dora_on_weights_it_would_misread_is_refused():
    model = small_model("qwen3")
    nn.quantize(model, group_size=64, bits=6)
    with pytest.raises(ConfigError, match=r"cannot put on weights of 6 bits\. Try adapter=lora"):
        add_adapter(model, "dora", **SETTINGS)
    add_adapter(model, "lora", **SETTINGS)


def test_linear_attention_is_adapted():
    keys = add_adapter(small_model("qwen3_5"), "lora", **SETTINGS)["lora_parameters"]["keys"]
    assert {"linear_attn.in_proj_qkv", "linear_attn.out_proj", "self_attn.q_proj", "mlp.up_proj"} <= set(keys)


def played(policy, environment="arithmetic"):
    trajectories, _ = engine_of(policy).play(some_requests(environment), Sampling())
    return collate([Group("all", tuple(trajectories))])


def shaken(**changes):
    policy = tiny(**changes)
    updates = [
        (name, array + 0.1 * mx.random.normal(array.shape, key=mx.random.key(number)))
        for number, (name, array) in enumerate(tree_flatten(policy.model.trainable_parameters()))
    ]
    policy.model.load_weights(updates, strict=False)
    return policy


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_a_4_bit_base_trains_its_adapter_changes_and_its_hash_does_not(adapter):
    policy, algorithm = tiny(adapter, precision="4bit"), settings("algorithm", "grpo")
    frozen, before = base_hash(policy.model), dict(tree_flatten(policy.model.trainable_parameters()))
    updater_of(policy).update(algorithm, algorithm.credit(played(policy)))
    after = dict(tree_flatten(policy.model.trainable_parameters()))
    assert any(not mx.array_equal(before[name], after[name]) for name in before)
    assert base_hash(policy.model) == frozen


def kl_to_reference(policy):
    """Mean of k3 over the sampled tokens, as kl/reference is."""
    batch = score(policy, played(policy), 1.0, old=True, reference=True, rows=0)
    difference = batch.reference_logp - batch.old_logp
    k3 = mx.where(batch.action_mask, mx.exp(difference) - 1 - difference, 0)
    return (k3.sum() / batch.action_mask.sum()).item()


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_h14_rl_from_a_saved_adapter_begins_with_no_kl_to_its_start_and_some_to_the_base(adapter, tmp_path):
    shaken(adapter=adapter).save(tmp_path)
    start = tiny(adapter, init=str(tmp_path))
    assert kl_to_reference(start) <= 1e-6
    assert kl_to_reference(tiny(adapter, init=str(tmp_path), reference="base")) > 1e-2
    # and it stays where RL began, while the policy moves
    algorithm = settings("algorithm", "grpo")
    updater_of(start, learning_rate=1e-2).update(algorithm, algorithm.credit(one_turn_batch([[1.0, 0.0]])))
    assert kl_to_reference(start) > 1e-4


@pytest.mark.parametrize("adapter", ["lora", "dora", "full"])
def test_h14_a_reference_fixed_after_a_warm_start_is_the_warm_policy(adapter):
    policy = shaken(adapter=adapter)
    assert kl_to_reference(policy) > 1e-3
    assert policy.fix_reference().startswith("the policy that training starts from, a copy of")
    live = policy.model(PROMPT)
    assert kl_to_reference(policy) <= 1e-6
    assert mx.array_equal(policy.model(PROMPT), live)


def test_a_fresh_adapter_needs_no_copy_and_a_run_that_compares_with_nothing_keeps_none():
    assert "which is the base model" in tiny().fix_reference()
    assert "without the adapter" in tiny(reference="base").fix_reference()
    policy = open_policy(source="tiny", path=None, shape=None, adapter="full", seed=0, keep_reference=False)
    with pytest.raises(RuntimeError, match="no reference was kept"), policy.reference():
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": 1.0}, r"adapter\.init=.*adapter\.scale is 1\.0, the saved one's is 4\.0"),
        ({"rank": 2}, r"adapter\.rank is 2, the saved one's is 4"),
        ({"targets": ["q_proj"]}, r"adapter\.targets names other layers"),
        ({"adapter": "dora"}, r"adapter is dora, the saved one is lora"),
    ],
)
def test_an_initial_adapter_that_means_something_else_here_is_refused(changes, message, tmp_path):
    tiny().save(tmp_path)
    opened = {"source": "tiny", "path": None, "shape": None, "adapter": "lora", "seed": 0, "keep_reference": False}
    with pytest.raises(ConfigError, match=message):
        open_policy(**opened | {"rank": 4, "scale": 4.0, "init": str(tmp_path)} | changes)


def test_an_adapter_that_mlx_lm_saved_without_naming_its_layers_is_a_start_too(tmp_path):
    policy = shaken()
    policy.save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    del config["lora_parameters"]["keys"], config["base_model"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert mx.array_equal(tiny(init=str(tmp_path)).model(PROMPT), policy.model(PROMPT))
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        tiny(init=str(tmp_path))


@pytest.mark.parametrize("precision", ["stored", "4bit"])
@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_h15_mlx_lm_opens_a_saved_adapter_in_a_fresh_process_and_gives_the_live_logits(adapter, precision, tmp_path):
    base = TINY
    if precision == "4bit":
        base = tmp_path / "base"
        mlx_lm.convert(str(TINY), str(base), quantize=True, q_bits=4, q_group_size=64)
    policy = shaken(adapter=adapter, source="local", path=str(base))
    saved = tmp_path / "adapter"
    policy.save(saved)
    code = (
        "from mlxrl_runs import backend; backend.prepare()\n"  # the same BLAS: another one rounds by 1.1e-5
        "import json, mlx.core as mx, mlx_lm\n"
        "from mlx.utils import tree_flatten\n"
        f"load = lambda **more: mlx_lm.load({str(base)!r}, **more)[0]\n"
        f"model = load(adapter_path={str(saved)!r})\n"
        f"prompt = mx.array({PROMPT.tolist()})\n"
        f"names = set(mx.load({str(saved / 'adapters.safetensors')!r}))\n"
        "matched = names & {name for name, _ in tree_flatten(model.parameters())}\n"
        "print(json.dumps([model(prompt).tolist(), load()(prompt).tolist(), len(matched), len(names)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    adapted, bare, matched, saved_count = json.loads(done.stdout.splitlines()[-1])
    assert mx.abs(mx.array(adapted) - policy.model(PROMPT)).max().item() < 1e-5
    assert mx.abs(mx.array(bare) - policy.model(PROMPT)).max().item() > 1e-1
    assert matched == saved_count == len(tree_flatten(policy.model.trainable_parameters()))
    config = json.loads((saved / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == adapter
    assert config["base_model"] == {"path": str(base), "revision": None, "precision": "stored"}
