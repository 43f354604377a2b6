import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from building import engine_of, settings, some_requests, tiny, trajectory, turn, updater_of
from families import SIZES
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.policy.forward import token_outputs
from mlxrl_runs.policy.load import TINY, open_policy
from mlxrl_runs.policy.precision import is_quantised, with_precision
from mlxrl_runs.rollout.on_policy import group_up
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.training.score import score

TINY_LORA = {
    "source": "tiny", "path": None, "shape": None, "adapter": "lora", "seed": 0, "keep_reference": False, "rank": 4,
    "scale": 4.0,
}  # fmt: skip
PROMPT = mx.array([[7, 8, 9, 10, 11]])


def weights_of(module):
    return dict(tree_flatten(module.parameters()))


def shake(policy, size=0.1):
    """Give every trainable weight a random push."""
    changed = [
        (name, array + size * mx.random.normal(array.shape, key=mx.random.key(number)))
        for number, (name, array) in enumerate(tree_flatten(policy.model.trainable_parameters()))
    ]
    policy.model.load_weights(changed, strict=False)


def test_the_shipped_model_opens_with_mlx_lm_and_speaks():
    model, tokenizer = mlx_lm.load(str(TINY))
    assert len(model.layers) == 4
    text = mlx_lm.generate(
        model,
        tokenizer,
        tokenizer.apply_chat_template([{"role": "user", "content": "3+4 ="}], add_generation_prompt=True),
        max_tokens=12,
    )
    assert "<solution>" in text


def test_a_new_adapter_changes_nothing_and_only_its_own_weights_can_learn():
    base, _ = mlx_lm.load(str(TINY))
    policy = tiny()
    assert mx.array_equal(policy.model(PROMPT), base(PROMPT))
    names = [name for name, _ in tree_flatten(policy.model.trainable_parameters())]
    assert len(names) == 4 * 7 * 2  # layers x (q k v o gate up down) x (a, b)
    assert all(name.endswith(("lora_a", "lora_b")) for name in names)


def test_the_reference_is_the_base_bit_for_bit_and_the_adapter_comes_back():
    base, _ = mlx_lm.load(str(TINY))
    policy = tiny()
    shake(policy)
    live = policy.model(PROMPT)
    with policy.reference() as reference:
        assert mx.array_equal(reference(PROMPT), base(PROMPT))
    assert mx.array_equal(policy.model(PROMPT), live)
    assert not mx.array_equal(live, base(PROMPT))


def test_under_full_training_the_reference_is_a_frozen_copy():
    policy = tiny("full")
    before = policy.model(PROMPT)
    shake(policy)
    with policy.reference() as reference:
        assert mx.array_equal(reference(PROMPT), before)
    assert not mx.array_equal(policy.model(PROMPT), before)


@pytest.mark.parametrize("targets", ["all", ["q_proj", "v_proj"]])
def test_h15_a_saved_adapter_loaded_by_mlx_lm_equals_the_live_model(tmp_path, targets):
    policy = tiny(targets=targets)
    shake(policy)
    policy.save(tmp_path)
    other, _ = mlx_lm.load(str(TINY), adapter_path=str(tmp_path))
    assert mx.abs(other(PROMPT) - policy.model(PROMPT)).max().item() < 1e-5
    loaded = [name for name in weights_of(other) if name.endswith(("lora_a", "lora_b"))]
    assert len(loaded) == len(mx.load(str(tmp_path / "adapters.safetensors")))
    config = json.loads((tmp_path / "adapter_config.json").read_text())["lora_parameters"]
    assert (config["rank"], config["scale"], config["dropout"]) == (4, 4.0, 0.0)


def test_a_fully_trained_model_is_saved_as_a_folder_mlx_lm_opens(tmp_path):
    policy = tiny("full")
    shake(policy, 0.01)
    policy.save(tmp_path)
    other, tokenizer = mlx_lm.load(str(tmp_path))
    assert mx.array_equal(other(PROMPT), policy.model(PROMPT))
    assert tokenizer.encode("door red") == policy.tokenizer.encode("door red")


def test_saved_weights_come_back_and_those_of_another_shape_are_refused(tmp_path):
    policy = tiny()
    shake(policy)
    policy.save(tmp_path)
    fresh = tiny()
    fresh.load_weights(tmp_path)
    assert mx.array_equal(fresh.model(PROMPT), policy.model(PROMPT))
    with pytest.raises(ConfigError, match=r"adapter\.targets names other layers"):
        tiny(targets=["q_proj"]).load_weights(tmp_path)
    # same shapes, another policy: seen in use, success .02 -> 0 and exit 0
    rescaled = open_policy(**TINY_LORA | {"scale": 1.0})
    with pytest.raises(ConfigError, match=r"adapter\.scale is 1\.0, the saved one's is 4\.0"):
        rescaled.load_weights(tmp_path)
    weights = (tmp_path / "adapters.safetensors").read_bytes()
    (tmp_path / "adapters.safetensors").write_bytes(weights[:1000])
    with pytest.raises(ConfigError, match="damaged"):
        fresh.load_weights(tmp_path)
    with pytest.raises(ConfigError, match=r"no adapters\.safetensors"):
        fresh.load_weights(tmp_path / "nowhere")


def test_unknown_targets_are_refused_with_the_names_the_model_has():
    with pytest.raises(ConfigError, match=r"c_attn; this model has .*q_proj"):
        tiny(targets=["c_attn"])


def quantised_folder(path):
    """The shipped model in 4 bits, as a folder, with its logits."""
    model, _ = mlx_lm.load(str(TINY))
    config = json.loads((TINY / "config.json").read_text())
    nn.quantize(model, group_size=32, bits=4)
    for file in TINY.iterdir():
        if file.suffix in (".json", ".jinja"):
            (path / file.name).write_bytes(file.read_bytes())
    (path / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 4}}))
    mx.save_safetensors(str(path / "model.safetensors"), weights_of(model))
    return {"source": "local", "path": str(path), "shape": None, "seed": 0, "keep_reference": False}, model(PROMPT)


def test_full_training_of_quantised_weights_is_refused(tmp_path):
    folder, _ = quantised_folder(tmp_path)
    with pytest.raises(ConfigError, match="adapter: got full"):
        open_policy(adapter="full", **folder)
    assert open_policy(adapter="lora", **folder).trainable_parameters > 0  # QLoRA: the float adapter learns


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "4bit"])
def test_a_precision_is_that_of_the_base_and_stays_close_to_it(precision):
    policy = open_policy(**TINY_LORA, precision=precision)
    base, _ = mlx_lm.load(str(TINY))
    kinds = {array.dtype for name, array in weights_of(policy.model).items() if "lora" not in name}
    assert kinds <= {{"float32": mx.float32, "bfloat16": mx.bfloat16, "4bit": mx.uint32}[precision], mx.float32}
    assert is_quantised(policy.model) == (precision == "4bit")
    difference = mx.abs(policy.model(PROMPT).astype(mx.float32) - base(PROMPT)).max().item()
    low, high = {"float32": (0, 0), "bfloat16": (1e-4, 0.5), "4bit": (1e-2, 6)}[precision]  # of logits up to 17
    assert low <= difference <= high
    assert ("quantization" in policy.config) == (precision == "4bit")


def test_a_quantised_base_becomes_float_when_asked_and_can_then_be_trained_whole(tmp_path):
    folder, expected = quantised_folder(tmp_path)
    whole = open_policy(**folder, adapter="full", precision="float32")
    assert not is_quantised(whole.model) and "quantization" not in whole.config
    assert mx.abs(whole.model(PROMPT) - expected).max().item() < 1e-3


def test_4_bits_are_refused_where_groups_do_not_fit():
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    with pytest.raises(ConfigError, match=r"model\.precision: 4bit needs .* multiple of 64; layers\.1 has 96"):
        with_precision(model, {}, "4bit")


def test_end_marks_are_those_of_every_file(tmp_path):
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    config = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    policy = open_policy(**TINY_LORA | {"source": "local", "path": str(tmp_path)})
    assert policy.eos_ids == {0, 5, 7, 1}  # 1: the tokenizer's


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())
    with pytest.raises(ConfigError, match="cannot be opened by mlx-lm"):
        open_policy(source="local", path=str(tmp_path), shape=None, adapter="lora", seed=0, keep_reference=False)


def test_a_model_that_brings_code_is_refused_and_its_code_is_not_run(tmp_path):
    config = json.loads((TINY / "config.json").read_text()) | {"model_file": "mine.py"}
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "model/mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ConfigError, match=r"cannot be opened by mlx-lm.*mine\.py"):
        open_policy(**TINY_LORA | {"source": "local", "path": str(tmp_path / "model")})
    assert not (tmp_path / "ran").exists()


def test_random_models_are_drawn_from_the_seed_alone():
    draw = lambda seed: open_policy(
        source="random", path=None, shape="1m", adapter="full", seed=seed, keep_reference=False
    )
    assert mx.array_equal(draw(1).model(PROMPT), draw(1).model(PROMPT))
    assert not mx.array_equal(draw(1).model(PROMPT), draw(2).model(PROMPT))


def test_dropout_acts_while_a_gradient_is_taken_and_nowhere_else():
    policy = tiny(dropout=0.5)
    shake(policy)
    assert mx.array_equal(policy.model(PROMPT), policy.model(PROMPT))
    trajectories, _ = engine_of(policy).play(some_requests("arithmetic"), Sampling())
    batch = collate([Group("all", tuple(trajectories))])
    logp = token_outputs(policy.model, batch, 1.0).logp
    assert mx.abs(logp - batch.sampler_logp).max().item() < 1e-4  # sampled without dropout
    report = updater_of(policy).update(settings("algorithm", "grpo"), settings("algorithm", "grpo").credit(batch))
    assert mx.abs(report.outputs.logp - logp).max().item() > 1e-2  # trained with it
    assert not policy.model.training


def test_the_split_head_gives_what_the_whole_model_gives(monkeypatch):
    from mlxrl_runs.policy import forward

    policy = tiny()
    trajectories, _ = engine_of(policy).play(some_requests("recurring"), Sampling())
    batch = collate([Group("all", tuple(trajectories))])
    split = token_outputs(policy.model, batch, 0.8)
    monkeypatch.setattr(forward, "SPLITTABLE", ())
    whole = token_outputs(policy.model, batch, 0.8)
    assert mx.abs(split.logp - whole.logp).max().item() < 1e-5
    assert mx.abs(split.entropy - whole.entropy).max().item() < 1e-5
    assert mx.array_equal(split.is_likeliest, whole.is_likeliest)
    assert 0 < split.is_likeliest.sum().item() < batch.action_mask.sum().item()


def test_h09_old_and_reference_log_probabilities_use_the_sampling_temperature_too():
    policy = tiny()
    shake(policy)
    trajectories, _ = engine_of(policy).play(some_requests("arithmetic"), Sampling(temperature=0.5))
    batch = collate([Group("all", tuple(trajectories))])
    scored = score(policy, batch, 0.5, old=True, reference=True, rows=0)
    assert mx.abs(scored.old_logp - batch.sampler_logp).max().item() < 1e-4
    with policy.reference() as reference:
        expected = token_outputs(reference, batch, 0.5).logp
        undivided = token_outputs(reference, batch, 1.0).logp
    assert mx.array_equal(scored.reference_logp, expected)
    assert mx.abs(expected - undivided).max().item() > 0.1


def test_h07_padding_changes_no_log_probability_of_any_turn():
    policy = tiny()
    trajectories, _ = engine_of(policy).play(some_requests("recurring", tasks=2), Sampling())
    together = token_outputs(policy.model, collate([Group("all", tuple(trajectories))]), 1.0).logp
    for row, episode in enumerate(trajectories):
        alone = token_outputs(policy.model, collate([Group("one", (episode,))]), 1.0).logp
        assert mx.abs(together[row, : alone.shape[1]] - alone[0]).max().item() < 1e-5


def test_a_frozen_head_in_chunks_gives_the_gradient_of_the_plain_one(monkeypatch):
    from mlxrl_runs.policy import forward, head

    policy = tiny()
    shake(policy)
    trajectories, _ = engine_of(policy).play(some_requests("recurring"), Sampling())
    batch = collate([Group("all", tuple(trajectories))])
    slope = nn.value_and_grad(policy.model, lambda model: (token_outputs(model, batch, 0.8).logp ** 2).sum())
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 5 * policy.model.args.vocab_size)  # five positions at a time
    value, chunked = slope(policy.model)
    monkeypatch.setattr(forward, "SPLITTABLE", ())
    plain_value, plain = slope(policy.model)
    assert value.item() == pytest.approx(plain_value.item(), rel=1e-5)
    for (name, one), (_, other) in zip(tree_flatten(chunked), tree_flatten(plain), strict=True):
        assert mx.abs(one - other).max().item() < 1e-5 * mx.abs(other).max().item() + 1e-6, name


@pytest.mark.parametrize("environment", ["arithmetic", "recurring"])
def test_a_prompt_computed_once_for_its_group_gives_the_gradient_of_one_pass_a_row(environment, monkeypatch):
    from mlxrl_runs.policy import forward

    policy = tiny()
    shake(policy)
    requests = some_requests(environment, tasks=3, members=4)
    trajectories, _ = engine_of(policy).play(requests, Sampling())
    batch = collate(group_up(["a", "b", "c"], trajectories, 4))
    slope = nn.value_and_grad(policy.model, lambda model: (token_outputs(model, batch, 1.0).logp ** 2).sum())
    monkeypatch.setattr(forward, "SHARE_FROM", 0.0)
    value, shared = slope(policy.model)
    monkeypatch.setattr(forward, "SHARE_FROM", 2.0)
    plain_value, plain = slope(policy.model)
    assert value.item() == pytest.approx(plain_value.item(), rel=1e-5)
    for (name, one), (_, other) in zip(tree_flatten(shared), tree_flatten(plain), strict=True):
        assert mx.abs(one - other).max().item() < 2e-5 * mx.abs(other).max().item() + 1e-6, name


def test_prompts_are_shared_only_where_that_saves_a_quarter_of_the_tokens():
    from mlxrl_runs.policy.forward import shares_prompts
    from mlxrl_runs.policy.shared_prompt import Prompts

    def shares(prompt_tokens, action_tokens):  # 2 members: one prompt is computed again
        members = tuple(trajectory(turn([7] * action_tokens, context=[5] * prompt_tokens), member=i) for i in (0, 1))
        batch = collate([Group("t", members)])
        return shares_prompts(batch, Prompts.of(batch))

    assert shares(10, 10) and shares(30, 10)  # 10 of 40 tokens; 30 of 80
    assert not shares(10, 11)  # 10 of 42


def test_a_model_that_forgets_what_is_far_back_reads_each_row_by_itself():
    # 10 prompt tokens, a window of 4: repeated keys and values would show the whole prompt to every token behind it
    sizes = SIZES | {"model_type": "llama", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    model = llama.Model(llama.ModelArgs.from_dict(sizes))
    members = [trajectory(turn([20 + member, 30, 31], context=range(10)), member=member) for member in range(4)]
    batch = collate([Group("t", tuple(members))])
    shared = token_outputs(model, batch, 1.0).logp
    alone = [token_outputs(model, batch.select_rows([row]), 1.0).logp for row in range(4)]  # nothing to share
    assert mx.abs(shared - mx.concatenate(alone)).max().item() < 1e-4
