"""What a model family must do before its rows are decoded together."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.qwen3 import Attention, Model
from mlx_lm.tuner.lora import LoRALinear

from building import tiny
from families import FAMILIES, MIXTURES, small_model
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.protocols import StepResult
from mlxrl_runs.core.trajectory import Group, StopReason
from mlxrl_runs.policy.adapters import add_adapter
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.forward import token_outputs
from mlxrl_runs.policy.precision import with_precision
from mlxrl_runs.rollout import engine as engines
from mlxrl_runs.rollout.blocks import DenseBlocks
from mlxrl_runs.rollout.engine import Decoding, RolloutEngine
from mlxrl_runs.rollout.episodes import EpisodeRequest, Limits
from mlxrl_runs.rollout.layers import Keeps, kept_by
from mlxrl_runs.rollout.one_by_one import SingleRow
from mlxrl_runs.rollout.plan import Plan, Way, choose
from mlxrl_runs.rollout.probe import why_not_batched
from mlxrl_runs.rollout.rows import Rows
from mlxrl_runs.rollout.sampling import Sampling, row_keys
from mlxrl_runs.rollout.stepping import Cursor, Stepper

LONG, SHORT = list(range(5, 17)), [20, 21, 22]  # 12 and 3 tokens
NEXT = [30, 31, 32, 33]


def logp(logits):
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def read_and_append(model, way, prompts):
    """Log-probabilities behind the prompts and behind each token of NEXT, all rows together."""
    stepper = Stepper(model, kept_by(model), way, Sampling(), frozenset())
    stepper.begin()
    rows = Rows.empty(kept_by(model), len(prompts), 1)
    return [logp(stepper.read(rows, prompts)), *(logp(stepper.append(rows, [token] * len(prompts))) for token in NEXT)]


def ways(model):
    return (Way.PLAIN, Way.FUSED) if DenseBlocks.supports(model) else (Way.PLAIN,)


TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "4bit": 1e-4}  # nats


def apart(left, right, precision):
    """The largest difference; in bfloat16, which rounds a logit of 4 to 1/64, the mean."""
    difference = mx.abs(left - right)
    return (difference.mean() if precision == "bfloat16" else difference.max()).item()


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_h10_a_short_row_beside_a_long_one_is_what_it_is_alone(family, precision):
    if precision == "bfloat16" and family in MIXTURES and mx.default_device().type == mx.DeviceType.cpu:
        pytest.skip("MLX multiplies experts on a CPU in float32 alone")
    model, _ = with_precision(small_model(family), {}, precision)
    model.eval()
    for way in ways(model):
        together = read_and_append(model, way, [LONG, SHORT])
        for row, prompt in enumerate([LONG, SHORT]):
            alone = SingleRow(model)
            expected = [logp(alone.feed(prompt)), *(logp(alone.feed([token])) for token in NEXT)]
            full = logp(model(mx.array([[*prompt, *NEXT]])))[0, len(prompt) - 1 :]
            for number, (batched, single) in enumerate(zip(together, expected, strict=True)):
                assert apart(batched[row], single[0], precision) < TOLERANCE[precision]
                assert apart(batched[row], full[number], precision) < TOLERANCE[precision]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_ended_stays_as_it_was_whatever_is_queued_behind(family):
    model = small_model(family)
    kinds = kept_by(model)
    stepper = Stepper(model, kinds, Way.PLAIN, Sampling(), frozenset())
    rows = Rows.empty(kinds, 2, 1)
    stepper.read(rows, [LONG, SHORT])
    rows.make_room(32)
    short = [tuple(array[1] for array in arrays) for arrays in rows.kept]
    cursor = Cursor(
        tokens=mx.array([7, 8]), lengths=mx.array(rows.lengths), active=mx.array([True, False]),
        drawn=mx.array([1, 1]), limits=mx.array([9, 9]), keys=row_keys([("a",), ("b",)]),
        greedy=mx.array([False, False]), longest=len(LONG), is_level=False,
    )  # fmt: skip
    for _ in range(5):
        cursor, written = stepper.step(rows, cursor)
    assert cursor.lengths.tolist() == [len(LONG) + 5, len(SHORT)] and cursor.drawn.tolist() == [6, 1]
    assert written.tokens[1].item() == 8
    for kind, before, after in zip(kinds, short, rows.kept, strict=True):
        for old, new in zip(before, after, strict=True):
            read = slice(None) if kind is Keeps.STATES else (slice(None), slice(len(SHORT)))
            assert mx.array_equal(old[read], new[1][read])


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_short_row_writes_on_for_long_beside_a_long_one_that_ended(family):
    # room for 32 tokens is enough for either: 30 + 1 and 3 + 12. Steps counted from the longest row pass 32
    model, prompts = small_model(family), [list(range(5, 35)), SHORT]
    kinds = kept_by(model)
    stepper = Stepper(model, kinds, Way.PLAIN, Sampling(), frozenset())
    rows = Rows.empty(kinds, 2, 1)
    rows.make_room(32)
    part = Rows.empty(kinds, 2, 1)
    stepper.read(part, prompts)
    rows.kept = [tuple(array[:, :, :32] for array in arrays) for arrays in part.kept]
    cursor = Cursor(
        tokens=mx.array([7, 8]), lengths=mx.array([30, 3]), active=mx.array([True, True]), drawn=mx.array([1, 1]),
        limits=mx.array([2, 13]), keys=row_keys([("a",), ("b",)]), greedy=mx.array([True, True]), longest=30,
        is_level=False,
    )  # fmt: skip
    written = []
    for _ in range(12):
        cursor, new = stepper.step(rows, cursor)
        written.append(new.tokens[1].item())
    alone, token = SingleRow(model), 8
    alone.feed(SHORT)
    for found in written:
        token = mx.argmax(alone.feed([token])).item()
        assert found == token


class Talk:
    """Two turns; the first observation is as long as its task's name says."""

    max_turns = 2

    def __init__(self, length):
        self.length = length

    def reset(self):
        return "red door " * self.length

    def step(self, action):
        return StepResult("blue", 0.0, False)

    def state_id(self, observation):
        return observation


@pytest.mark.parametrize("compile_when", ["never", "always"])
@pytest.mark.parametrize("family", FAMILIES)
def test_h10_every_family_samples_what_training_scores(family, compile_when):
    tokenizer = tiny().tokenizer
    model = small_model(family, len(tokenizer))
    decoding = Decoding(compile_when=compile_when, max_rows=2)
    engine = RolloutEngine(model, ChatFormat(tokenizer), frozenset({1}), Limits(max_completion_tokens=5), decoding)
    assert engine.mode == "batched"
    requests = [
        EpisodeRequest(str(length), 0, lambda length=length: Talk(length), ("seed", length)) for length in (1, 2, 9)
    ]
    episodes, _ = engine.play(requests, Sampling())
    batch = collate([Group("all", tuple(episodes))])  # padded on the right, where nothing looks
    scored = token_outputs(model, batch, 1.0).logp
    assert mx.abs(scored - batch.sampler_logp).max().item() < 1e-4


def test_h10_a_family_unknown_to_the_tests_is_probed_and_played_one_by_one_where_rows_disagree():
    class Blind(Attention):
        """Looks at everything that is in the cache, whatever the mask says."""

        def __call__(self, x, mask=None, cache=None):
            return super().__call__(x, None, cache)

    class Stranger(Model):
        """A class of this module, which is none that the tests know."""

    model = small_model("qwen3", len(tiny().tokenizer))
    model.__class__ = Stranger
    assert why_not_batched(model, kept_by(model)) is None
    for layer in model.layers:
        layer.self_attn.__class__ = Blind
    engine = RolloutEngine(model, ChatFormat(tiny().tokenizer), frozenset({1}), Limits(max_completion_tokens=5))
    assert engine.mode == "sequential" and "nats apart" in engine.mode_reason


def test_a_family_that_takes_a_mask_of_rows_for_one_of_heads_is_played_row_by_row(monkeypatch):
    # mlx-lm's gemma2 with grouped heads, two rows and two groups of them: no error, and wrong
    monkeypatch.setitem(FAMILIES, "gemma2", FAMILIES["gemma2"] | {"num_attention_heads": 4})
    model = small_model("gemma2", len(tiny().tokenizer))
    engine = RolloutEngine(model, ChatFormat(tiny().tokenizer), frozenset({1}), Limits(max_completion_tokens=5))
    assert engine.mode == "sequential" and "one by one" in engine.mode_reason
    assert sampled_apart_from_scored(model) < 1e-4


@pytest.mark.parametrize("mode", ["mxfp4", "affine"])
def test_an_adapter_on_quantised_weights_is_sampled_as_it_is_trained_in_every_way(mode, monkeypatch):
    model = small_model("llama", len(tiny().tokenizer))
    nn.quantize(model, group_size=32, bits=4, mode=mode)
    add_adapter(model, "lora", rank=4, scale=4.0, dropout=0.0, targets="auto", seed=0)
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            module.lora_b = mx.random.normal(module.lora_b.shape, scale=0.1, key=mx.random.key(len(name)))
    for way in ways(model):
        monkeypatch.setattr(engines, "choose", lambda *_, way=way: Plan(way, "a test says so"))
        assert sampled_apart_from_scored(model) < 1e-4


def sampled_apart_from_scored(model):
    tokenizer = tiny().tokenizer
    engine = RolloutEngine(model, ChatFormat(tokenizer), frozenset({1}), Limits(max_completion_tokens=5))
    requests = [EpisodeRequest("talk", n, lambda: Talk(2), ("talk", n)) for n in range(3)]
    episodes, _ = engine.play(requests, Sampling())
    batch = collate([Group("all", tuple(episodes))])
    scored = token_outputs(model, batch, 1.0).logp
    return mx.abs(scored - batch.sampler_logp).max().item()


def test_layers_quantised_in_different_ways_are_not_taken_for_one_another():
    # compiled in segments, one layer's form stands for all of them: not here, with 8 bits in one place
    model = small_model("llama")
    finer = lambda path, module: (
        hasattr(module, "to_quantized")
        and ({"bits": 8, "group_size": 32} if path.endswith("layers.1.mlp.down_proj") else True)
    )
    nn.quantize(model, group_size=32, bits=4, class_predicate=finer)
    plan = choose(model, "always", None)
    assert plan.way is Way.FUSED and Way.SEGMENTS not in plan.others
    nn.quantize(alike := small_model("llama"), group_size=32, bits=4)
    assert Way.SEGMENTS in choose(alike, "always", None).others


class Chat(Talk):
    """Many turns, whatever is answered."""

    max_turns = 4


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3_text"])
def test_a_row_that_a_stop_string_ended_reads_on_from_there(family):
    # states cannot be turned back: the row must not have read what was decoded behind the stop string
    tokenizer = tiny().tokenizer
    model = small_model(family, len(tokenizer))
    limits = Limits(max_completion_tokens=12, stop_strings=("e", "1", "o"))
    engine = RolloutEngine(model, ChatFormat(tokenizer), frozenset({1}), limits)
    requests = [EpisodeRequest("chat", n, lambda: Chat(1), ("chat", n)) for n in range(12)]
    episodes, _ = engine.play(requests, Sampling())
    assert {turn.stop for episode in episodes for turn in episode.turns[:-1]} >= {StopReason.STOP_STRING}
    batch = collate([Group("all", tuple(episodes))])
    scored = token_outputs(model, batch, 1.0).logp
    assert mx.abs(scored - batch.sampler_logp).max().item() < 1e-4
