"""Random small settings: however rows are decoded, each is what it is alone."""

import random
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

from building import tiny
from families import MIXTURES, small_model
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.protocols import StepResult
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.policy.adapters import add_adapter
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.forward import token_outputs
from mlxrl_runs.policy.precision import with_precision
from mlxrl_runs.rollout import engine as engines
from mlxrl_runs.rollout import stepping
from mlxrl_runs.rollout.blocks import DenseBlocks
from mlxrl_runs.rollout.engine import Decoding, RolloutEngine
from mlxrl_runs.rollout.episodes import EpisodeRequest, Limits
from mlxrl_runs.rollout.plan import Plan, Way
from mlxrl_runs.rollout.sampling import Sampling

WORDS = ["red", "door", "blue", "push", "pull", "1", "2", "3", "the"]
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "qwen3_moe", "qwen3_5")
SETTINGS = range(34)
TIE = 2e-4  # scores nearer than this may swap by rounding alone


class Chatter:
    """Words drawn from its seed, until it has had enough."""

    def __init__(self, seed, words, turns, end_share):
        self._stream = random.Random(seed)
        self._words, self.max_turns, self._end_share = words, turns, end_share

    def _say(self, count):
        return " ".join(self._stream.choice(WORDS) for _ in range(count))

    def reset(self):
        return self._say(self._words)

    def step(self, action):
        return StepResult(self._say(self._stream.randint(1, 12)), 0.0, self._stream.random() < self._end_share)

    def state_id(self, observation):
        return observation


def some_model(choose, vocabulary):
    family = choose.choice(FAMILIES)
    adapter, precision = choose.choice(["none", "lora", "dora"]), choose.choice(["float32", "float32", "4bit"])
    model, _ = with_precision(small_model(family, vocabulary), {}, precision)
    if adapter != "none":
        targets = "auto" if family in (*MIXTURES, "qwen3_5") else choose.choice(["auto", ["v_proj", "down_proj"]])
        add_adapter(model, adapter, rank=4, scale=4.0, dropout=0.0, targets=targets, seed=1)
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear | DoRALinear):
            key = mx.random.key(sum(map(ord, name)))
            module.lora_b = mx.random.normal(module.lora_b.shape, scale=0.1, key=key)
    model.eval()
    return model


def some_requests(choose, number):
    tasks, members = choose.randint(2, 6), choose.choice([1, 2, 4])
    words = [choose.choice([2, 2, 9, 30]) for _ in range(tasks)]
    if choose.random() < 0.5:
        words = words[:1] * tasks
    turns, end_share = choose.choice([1, 2, 4]), choose.choice([0, 0.3])
    requests = [
        EpisodeRequest(
            f"task {task}", member, lambda task=task: Chatter(task, words[task], turns, end_share),
            (number, task, member), greedy=choose.random() < 0.2,
            max_completion_tokens=choose.choice([None, None, 1, 4]),
        )
        for task in range(tasks)
        for member in range(members)
    ]  # fmt: skip
    choose.shuffle(requests)
    return requests


@pytest.mark.parametrize("number", SETTINGS)
def test_whatever_the_setting_a_row_is_what_it_is_alone(number, monkeypatch):
    choose = random.Random(number)
    tokenizer = tiny().tokenizer
    model = some_model(choose, len(tokenizer) + choose.choice([0, 77]))
    way = choose.choice(list(Way) if DenseBlocks.supports(model) else [Way.PLAIN, Way.PLAIN, Way.COMPILED])
    monkeypatch.setattr(engines, "choose", lambda *_: Plan(way, "a test says so"))
    monkeypatch.setattr(engines, "read_every", lambda _, steps=choose.choice([1, 1, 4]): steps)
    monkeypatch.setattr(stepping, "PASS_TOKENS", choose.choice([8192, 16]))
    eos = frozenset(choose.sample(range(len(tokenizer)), choose.choice([1, 30])))
    limits = Limits(choose.choice([1, 6, 12]), stop_strings=choose.choice([(), ("1", "re", "o")]))
    sampling = Sampling(
        temperature=choose.choice([1.0, 0.7]), top_k=choose.choice([0, 5]), min_p=choose.choice([0, 0.1]),
        token_bias=choose.choice([{}, {min(eos): 3.0}]),
    )  # fmt: skip
    decoding = Decoding(
        max_rows=choose.choice([None, 1, 2, 3, 5]), env_threads=choose.choice([0, 0, 2]),
        max_cache_bytes=choose.choice([None, None, 1]),
    )  # fmt: skip
    requests = some_requests(choose, number)
    engine = lambda decoding: RolloutEngine(model, ChatFormat(tokenizer), eos, limits, decoding)
    one_by_one = engine(replace(decoding, mode="sequential"))
    alone, statistics = one_by_one.play(requests, sampling, with_margins=True)
    together, _ = engine(decoding).play(requests, sampling)
    for request, row, other in zip(requests, alone, together, strict=True):
        mine, theirs = written(row), written(other)
        if mine != theirs:
            parts = next(place for place, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1])
            assert statistics.margins[request.key][parts] < TIE
    batch = collate([Group("all", tuple(together))])
    scored = token_outputs(model, batch, sampling.temperature).logp
    assert mx.abs(scored - batch.sampler_logp).max().item() < 3e-4


def written(trajectory):
    return [token for turn in trajectory.turns for token in turn.action]
