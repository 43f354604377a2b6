"""job=check: gates that pass on a right model, notice a wrong one, and leave the policy as it was."""

import json
import math

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from building import ALGORITHMS, tiny
from families import FAMILIES, small_model
from mlxrl_runs.check import gates
from mlxrl_runs.check.gates import GATES, Bench, DoesNotApply, Finding, examine, probe_logp
from mlxrl_runs.check.words import ADVICE, require_whole, table
from mlxrl_runs.config import compose_config, validate
from mlxrl_runs.errors import CheckFailed, Interrupted
from mlxrl_runs.policy.adapters import add_adapter
from mlxrl_runs.policy.load import Policy
from mlxrl_runs.policy.precision import with_precision
from mlxrl_runs.policy.source import Located

SAMPLING = ("batched = one by one", "sampled log-probability = training pass")
OF_ADAPTERS = ("adapters off = base", "saved adapter = live")


@pytest.fixture(autouse=True)
def fewer_tokens(monkeypatch):
    monkeypatch.setattr(gates, "ACTION_TOKENS", 5)
    monkeypatch.setattr(gates, "SENTENCES", (1, 6))


def bench_of(model, *overrides, kind="lora", dropout=0.0):
    """A model under a new adapter, with the tiny one's tokenizer."""
    config = validate(compose_config([f"adapter={kind}", *overrides]))
    policy = Policy(model, tiny().tokenizer, frozenset({1}), {}, Located("a test"))
    model.eval()
    base = None
    if kind != "full":
        base = probe_logp(policy)
        policy.adapter_config = add_adapter(model, kind, rank=4, scale=4.0, dropout=dropout, targets="auto", seed=0)
        model.eval()
    return Bench(policy, config, base, tokens=50)


def weights_of(bench):
    return {name: mx.array(array) for name, array in tree_flatten(bench.policy.model.parameters())}


class Blind(qwen3.Attention):
    """Looks at everything that is in the cache, whatever the mask says."""

    def __call__(self, x, mask=None, cache=None):
        return super().__call__(x, None, cache)


def blind_model():
    model = small_model("qwen3", len(tiny().tokenizer))
    for layer in model.layers:
        layer.self_attn.__class__ = Blind
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_every_gate_that_applies_to_it(family):
    report = examine(bench_of(small_model(family, len(tiny().tokenizer))))
    assert report.broken == [] and set(report.gates) == set(GATES)
    assert all(finding.tolerance == 1e-4 for finding in report.gates.values())


def test_a_family_whose_episodes_run_one_by_one_has_no_batch_to_compare(monkeypatch):
    monkeypatch.setattr("mlxrl_runs.rollout.engine.kept_by", lambda model: None)
    report = examine(bench_of(small_model("qwen3", len(tiny().tokenizer))))
    assert report.broken == []
    assert set(report.gates) == set(GATES) - {"batched = one by one", "compiled = plain"}
    assert "episodes run one by one" in report.found["batched = one by one"].reason


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_the_gates_of_an_adapter_apply_where_there_is_one(kind):
    report = examine(bench_of(small_model("qwen3", len(tiny().tokenizer)), kind=kind))
    assert report.broken == []
    missing = set(OF_ADAPTERS) if kind == "full" else set()
    assert set(report.gates) == set(GATES) - missing
    content = report.as_json()
    assert set(content["gates"]) == set(report.gates)  # what does not apply has not passed
    assert set(content["does_not_apply"]) == missing | ({"merged adapter"} if missing else set())


def test_h10_a_model_whose_attention_ignores_the_mask_is_broken():
    bench = bench_of(blind_model())
    report = examine(bench)
    assert set(SAMPLING) <= set(report.broken)
    found = report.gates["batched = one by one"]
    assert found.difference > 100 * found.tolerance and found.more["partings"] > 0
    with pytest.raises(CheckFailed) as failed:
        require_whole(report)
    text = str(failed.value)
    assert failed.value.exit_code == 1 and "batched = one by one: BROKEN. rollout.mode=sequential" in text
    assert any(line.startswith("batched = one by one") and line.endswith("BROKEN") for line in table(report))


@pytest.mark.parametrize("precision", ["bfloat16", "4bit"])
def test_numbers_that_round_more_are_allowed_more_and_a_mistake_is_still_found(precision):
    def rounded(model):
        model, _ = with_precision(model, {}, precision)
        model.set_dtype(mx.bfloat16)  # 4 bits: the scales, as in models of the hub
        return model

    right = examine(bench_of(rounded(small_model("qwen3", len(tiny().tokenizer)))))
    assert right.broken == [] and right.tolerance is gates.ROUNDED
    wrong = bench_of(rounded(blind_model()))
    with gates.stirred(wrong.policy):
        assert not any(GATES[name](wrong).passed for name in SAMPLING)


def test_one_layer_that_a_saved_adapter_forgot_shows_in_bfloat16_too(monkeypatch):
    model, _ = with_precision(small_model("qwen3", len(tiny().tokenizer)), {}, "bfloat16")
    bench = bench_of(model)
    with gates.stirred(bench.policy):
        assert gates.saved_adapter_is_live(bench).passed
        save = Policy.save

        def forgets(policy, folder):
            projection = policy.model.layers[0].mlp.up_proj
            kept, projection.lora_b = projection.lora_b, mx.zeros_like(projection.lora_b)
            save(policy, folder)
            projection.lora_b = kept

        monkeypatch.setattr(Policy, "save", forgets)
        assert not gates.saved_adapter_is_live(bench).passed


def test_quantised_weights_under_float32_scales_are_held_to_float32():
    model, _ = with_precision(small_model("qwen3", len(tiny().tokenizer)), {}, "4bit")
    report = examine(bench_of(model))
    assert report.broken == [] and report.tolerance is gates.EXACT
    assert "the base is quantised" in report.information["merged adapter"].reason


def test_what_merging_the_adapter_rounds_is_told_and_bars_nothing():
    model, _ = with_precision(small_model("qwen3", len(tiny().tokenizer)), {}, "bfloat16")
    report = examine(bench_of(model, "rollout.merge_adapter=always"))
    told = report.information["merged adapter"]
    assert told.difference > report.tolerance.repeated and not told.passed
    assert report.broken == []
    assert "passed" not in report.as_json()["information"]["merged adapter"]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_policy_is_afterwards_what_it_was(kind):
    bench = bench_of(small_model("qwen3", len(tiny().tokenizer)), kind=kind)
    before, names = weights_of(bench), [name for name, _ in bench.policy.model.named_modules()]
    kinds = [type(module) for module in bench.policy.model.modules()]
    examine(bench)
    after = weights_of(bench)
    assert before.keys() == after.keys() and all(mx.array_equal(before[name], after[name]) for name in before)
    assert [name for name, _ in bench.policy.model.named_modules()] == names
    assert [type(module) for module in bench.policy.model.modules()] == kinds
    assert not bench.policy.model.training


def test_a_new_adapter_is_stirred_or_it_would_hide_every_mistake():
    bench = bench_of(small_model("qwen3", len(tiny().tokenizer)))
    silent = probe_logp(bench.policy)
    with gates.stirred(bench.policy):
        moved = mx.abs(probe_logp(bench.policy) - silent).max().item()
    assert moved > 0.5  # well above what even rounded numbers are allowed
    assert mx.array_equal(probe_logp(bench.policy), silent)


def test_a_trained_adapter_keeps_what_it_learned_under_the_stirring():
    bench = bench_of(small_model("qwen3", len(tiny().tokenizer)))
    model = bench.policy.model
    learned = {name: array + 1 for name, array in tree_flatten(model.trainable_parameters()) if name.endswith("lora_b")}
    model.load_weights(list(learned.items()), strict=False)
    with gates.stirred(bench.policy):
        inside = dict(tree_flatten(model.trainable_parameters()))
        assert all(abs(inside[name].mean().item() - 1) < 0.2 for name in learned)


def test_dropout_makes_micro_batches_differ_and_that_is_no_fault():
    bench = bench_of(small_model("qwen3", len(tiny().tokenizer)), "adapter.dropout=0.5", dropout=0.5)
    report = examine(bench)
    assert report.broken == []
    assert "adapter.dropout=0.5" in report.found["micro-batches = whole"].reason
    assert report.gates["checkpointed = plain gradient"].passed  # the same numbers are left out twice


@pytest.mark.parametrize("choice", ["every_2", "none"])
def test_the_configs_own_checkpointing_is_what_is_examined(choice, monkeypatch):
    asked = []
    monkeypatch.setattr(Bench, "gradient", lambda bench, **given: asked.append(given) or {"w": mx.ones((2,))})
    bench = bench_of(small_model("qwen3", len(tiny().tokenizer)), f"memory.checkpoint={choice}")
    assert gates.checkpointed_is_plain(bench).passed
    assert [given["checkpoint_every"] for given in asked] == [2 if choice == "every_2" else 1, 0]


@pytest.mark.parametrize("override", ["algorithm.kl_coef=0.1", "algorithm.updates_per_batch=2"])
def test_gradients_are_those_of_the_configs_algorithm(override):
    bench = bench_of(small_model("qwen3", len(tiny().tokenizer)), override)
    with gates.stirred(bench.policy):
        assert (bench.batch.reference_logp is None) == ("kl_coef" not in override)
        assert (bench.batch.old_logp is None) == ("updates_per_batch" not in override)
        assert max(mx.abs(array).max().item() for array in bench.plain_gradient.values()) > 0
        assert gates.checkpointed_is_plain(bench).passed and gates.micro_batches_are_whole(bench).passed


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradient_of_every_algorithm_is_examined(algorithm):
    # actions are cut after 5 tokens here, and dapo trains no action that was cut; ppo's value head has a gradient too
    bench = bench_of(small_model("qwen3", len(tiny().tokenizer)), f"algorithm={algorithm}")
    bench.policy.config["hidden_size"] = 64
    if bench.algorithm.needs.values:
        bench.policy.add_value_head()
    with gates.stirred(bench.policy):
        assert gates.checkpointed_is_plain(bench).passed and gates.micro_batches_are_whole(bench).passed
        assert ("value.weight" in bench.plain_gradient) == (algorithm == "ppo")


def test_a_gradient_of_nothing_is_no_gradient_to_examine():
    bench = bench_of(small_model("qwen3", len(tiny().tokenizer)), "algorithm.mask_longer_than=4")
    assert isinstance(gates.micro_batches_are_whole(bench), DoesNotApply)


def test_compiled_and_plain_engines_are_compared_token_by_token():
    bench = bench_of(small_model("qwen3", len(tiny().tokenizer)))
    found = gates.compiled_is_plain(bench)
    assert found.passed and found.more["tokens"] >= 50


def test_a_gate_that_raises_is_broken_and_the_others_still_run(monkeypatch):
    def raises(bench):
        raise RuntimeError("no such kernel")

    right = Finding(0.0, 1e-4, "well")
    monkeypatch.setattr(gates, "GATES", {"batched = one by one": raises, "micro-batches = whole": lambda bench: right})
    report = examine(bench_of(small_model("qwen3", len(tiny().tokenizer))))
    assert report.broken == ["batched = one by one"]
    assert "raised RuntimeError: no such kernel" in "\n".join(table(report))
    with pytest.raises(CheckFailed, match="1 of 2 gates are broken"):
        require_whole(report)


def test_a_stop_ends_the_check_and_puts_the_policy_back():
    bench = bench_of(small_model("qwen3", len(tiny().tokenizer)))
    before = weights_of(bench)
    bench.stop.signal_number = 2
    with pytest.raises(Interrupted):
        examine(bench)
    assert all(mx.array_equal(array, before[name]) for name, array in weights_of(bench).items())


@pytest.mark.parametrize(
    ("difference", "mean", "passes"),
    [(1.0, 0.1, True), (1.1, 0.1, False), (1.0, 0.2, False), (math.nan, 0.1, False), (0.5, math.nan, False)],
)
def test_a_finding_passes_when_neither_its_largest_nor_its_average_is_too_large(difference, mean, passes):
    assert Finding(difference, 1.0, "", {"mean_difference": mean, "mean_tolerance": 0.1}).passed is passes


def test_the_table_says_how_each_was_measured_and_never_passes_what_does_not_apply():
    found = {"batched = one by one": Finding(2e-5, 1e-4, "9 tokens"), "saved adapter = live": DoesNotApply("none")}
    report = gates.Report(found, {"merged adapter": Finding(0.3, 1e-4, "a probe")}, gates.EXACT)
    lines = list(table(report))
    assert lines[1].split()[-3:] == ["2e-05", "0.0001", "pass"] and "9 tokens" in lines[2]
    assert lines[3].endswith("does not apply: none")
    assert lines[4].split()[-4:] == ["0.3", "-", "for", "information"]
    require_whole(report)
    assert json.loads(json.dumps(report.as_json()))["gates"].keys() == {"batched = one by one"}


def test_there_is_advice_for_every_gate():
    assert set(ADVICE) == set(GATES)
