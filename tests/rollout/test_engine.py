"""The engine against the plain version: full forwards, one row at a time, and counts of what was really fed."""

import time
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.tuner.lora import LoRALinear

from building import base_hash, engine_of, settings, some_requests, tiny
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.protocols import StepResult
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.core.trajectory import EndReason, Group, StopReason
from mlxrl_runs.errors import ConfigError, EnvironmentFailure, Interrupted
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.forward import token_outputs
from mlxrl_runs.rollout import engine as engines
from mlxrl_runs.rollout import stepping
from mlxrl_runs.rollout.engine import Decoding, RolloutEngine
from mlxrl_runs.rollout.episodes import EpisodeRequest, Limits
from mlxrl_runs.rollout.one_by_one import SingleRow
from mlxrl_runs.rollout.plan import Plan, Way
from mlxrl_runs.rollout.rows import kv_bytes
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.rollout.stepping import Stepper

TIE = 1e-4  # two perturbed scores nearer than this may swap between batch sizes, by rounding alone


def count_ties(pairs, margins):
    """How many rows part at a tie. Fails when two rows differ where there was none."""
    ties = 0
    for alone, together in pairs:
        if alone.tokens != together.tokens:
            drawn = list(zip(_actions(alone), _actions(together), strict=False))
            first = next(number for number, (a, b) in enumerate(drawn) if a != b)
            key = next(key for key in margins if key[-2:] == (alone.task, alone.member))
            assert margins[key][first] < TIE, f"row {key} parts at token {first} with margin {margins[key][first]}"
            ties += 1
    return ties


def _actions(trajectory):
    return [token for turn in trajectory.turns for token in turn.action]


@pytest.mark.parametrize("environment", ["arithmetic", "recurring"])
def test_batched_and_sequential_rollouts_draw_the_same_tokens(environment):
    policy = tiny()
    requests = some_requests(environment, tasks=6)
    together, statistics = engine_of(policy).play(requests, Sampling(), with_margins=True)
    alone, _ = engine_of(policy, mode="sequential").play(requests, Sampling())
    assert count_ties(zip(alone, together, strict=True), statistics.margins) <= 1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("environment", ["arithmetic", "recurring"])
def test_sampled_log_probabilities_are_those_of_a_full_forward_at_the_sampling_temperature(environment, temperature):
    policy = tiny()
    requests = some_requests(environment)
    trajectories, _ = engine_of(policy).play(requests, Sampling(temperature=temperature, top_k=50))
    batch = collate([Group("all", tuple(trajectories))])
    logp = token_outputs(policy.model, batch, temperature).logp
    assert mx.abs(logp - batch.sampler_logp).max().item() < 1e-4


def test_what_a_row_draws_does_not_depend_on_who_shares_its_batch():
    policy = tiny()
    requests = some_requests("recurring", tasks=3)
    whole, _ = engine_of(policy).play(requests, Sampling())
    part, _ = engine_of(policy).play(requests[5:7], Sampling())
    assert [row.tokens for row in part] == [row.tokens for row in whole[5:7]]


@pytest.mark.parametrize("compile_when", ["never", "always"])
def test_h11_siblings_and_steps_draw_differently_and_a_seed_repeats_itself(compile_when):
    engine = engine_of(tiny(), decoding=Decoding(compile_when=compile_when))  # one, with what it compiled
    play = lambda **where: [
        row.tokens for row in engine.play(some_requests("recurring", tasks=1, **where), Sampling())[0]
    ]
    first = play(step=1)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert play(step=2) != first
    assert play(step=1) == first
    assert play(step=1, seed=1) != first


class Spy:
    """Counts what a stepper read and how many rows it decoded at each step."""

    def __init__(self, monkeypatch):
        self.reads, self.steps = [], []
        read, step = Stepper.read, Stepper.step

        def counted_read(stepper, rows, contexts):
            self.reads.append([len(context) for context in contexts])
            return read(stepper, rows, contexts)

        def counted_step(stepper, rows, cursor):
            self.steps.append(len(rows.lengths))
            return step(stepper, rows, cursor)

        monkeypatch.setattr(Stepper, "read", counted_read)
        monkeypatch.setattr(Stepper, "step", counted_step)


def test_each_distinct_prompt_is_prefilled_once(monkeypatch):
    spy = Spy(monkeypatch)
    engine_of(tiny()).play(some_requests("arithmetic", tasks=3, members=8), Sampling())
    assert len(spy.reads) == 1 and len(spy.reads[0]) == 3  # 24 rows, 3 prompts


def test_members_that_come_later_share_the_prompt_that_was_read_before(monkeypatch):
    spy = Spy(monkeypatch)
    requests = some_requests("arithmetic", tasks=3, members=8)
    few, _ = engine_of(tiny(), decoding=Decoding(max_rows=5)).play(requests, Sampling())
    assert sum(len(rows) for rows in spy.reads) == 3
    assert max(spy.steps) == 5
    all_at_once, _ = engine_of(tiny()).play(requests, Sampling())
    assert [row.tokens for row in few] == [row.tokens for row in all_at_once]


def test_a_prompt_kept_for_members_to_come_is_not_written_over():
    # as many rows as prompts, all equally long: they begin as the prompts themselves. The third takes the place of the
    # first, whose prompt must still be there for the second member
    policy = tiny()
    words = {"red": 2, "blue": 4, "green": 6}
    requests = [
        EpisodeRequest(word, member, lambda word=word: Once(word), (word, member), max_completion_tokens=length)
        for member in range(2)
        for word, length in words.items()
    ]
    assert len({len(policy.tokenizer(word)["input_ids"]) for word in words}) == 1
    episodes, _ = engine_of(policy, decoding=Decoding(max_rows=2), ignore_eos=True).play(requests, Sampling())
    batch = collate([Group("all", tuple(episodes))])
    logp = token_outputs(policy.model, batch, 1.0).logp
    assert mx.abs(logp - batch.sampler_logp).max().item() < 1e-4


def test_no_token_is_read_twice(monkeypatch):
    fed = []
    feed = SingleRow.feed
    monkeypatch.setattr(SingleRow, "feed", lambda me, tokens: (fed.append(len(tokens)), feed(me, tokens))[1])
    [trajectory], _ = engine_of(tiny(), mode="sequential").play(some_requests("recurring", 1, 1), Sampling())
    assert len(trajectory.turns) > 1
    assert sum(fed) == len(trajectory.tokens) - 1  # everything but the very last sampled token


def test_rows_that_ended_leave_the_batch(monkeypatch):
    spy = Spy(monkeypatch)
    engine_of(tiny()).play(some_requests("arithmetic", tasks=8, members=8), Sampling())
    assert spy.steps[0] == 64 and spy.steps[-1] < 32


def test_rows_never_idle_while_episodes_wait(monkeypatch):
    spy = Spy(monkeypatch)
    lengths = [2, 16] * 24  # waves of 8 rows would take 6 x 16 steps
    requests = [
        replace(request, max_completion_tokens=length)
        for request, length in zip(some_requests("arithmetic", 12, 4), lengths, strict=True)
    ]
    engine = engine_of(tiny(), decoding=Decoding(max_rows=8), ignore_eos=True)
    trajectories, _ = engine.play(requests, Sampling())
    assert [len(row.turns[0].action) for row in trajectories] == lengths
    assert len(spy.steps) < 75  # 54 when no row waits for another


HARD = [
    Decoding(max_rows=1), Decoding(max_rows=5), Decoding(env_threads=3, max_rows=6), Decoding(compile_when="always"),
    Decoding(compile_when="always", max_rows=7), Decoding(max_cache_bytes=1),
]  # fmt: skip


@pytest.mark.parametrize("decoding", HARD, ids=str)
@pytest.mark.parametrize("environment", ["arithmetic", "recurring"])
def test_the_same_tokens_however_they_are_decoded(environment, decoding):
    policy = adapted()
    requests = some_requests(environment, tasks=4)
    plain, statistics = engine_of(policy, mode="sequential").play(requests, Sampling(), with_margins=True)
    engine = engine_of(policy, decoding=decoding)
    got, _ = engine.play(requests, Sampling())
    assert count_ties(zip(plain, got, strict=True), statistics.margins) <= 1
    again, _ = engine.play(requests[::-1], Sampling())  # the other way round, with what was compiled before
    assert count_ties(zip(plain, again[::-1], strict=True), statistics.margins) <= 1
    batch = collate([Group("all", tuple(got))])
    logp = token_outputs(policy.model, batch, 1.0).logp
    assert mx.abs(logp - batch.sampler_logp).max().item() < 1e-4


@pytest.mark.parametrize("way", [way for way in Way if way is not Way.PLAIN])
@pytest.mark.parametrize("environment", ["arithmetic", "recurring"])
def test_every_way_to_decode_draws_the_same_tokens(environment, way, monkeypatch):
    policy = adapted()
    requests = some_requests(environment, tasks=4)
    plain, statistics = engine_of(policy, mode="sequential").play(requests, Sampling(), with_margins=True)
    monkeypatch.setattr(engines, "choose", lambda *_: Plan(way, "a test says so"))
    monkeypatch.setattr(engines, "read_every", lambda _: 4)
    got, _ = engine_of(policy).play(requests, Sampling())
    assert count_ties(zip(plain, got, strict=True), statistics.margins) <= 1


def test_the_fastest_way_is_found_by_timing_once_and_remembered(tmp_path, monkeypatch):
    policy, requests, file = adapted(), some_requests("arithmetic"), tmp_path / "cache" / "timings.json"
    decoding = Decoding(compile_when="auto", tune="always", timings_file=file)
    engine = engine_of(policy, decoding=decoding)
    timed, _ = engine.play(requests, Sampling())
    assert set(engine.timings) == {16} and set(engine.timings[16]) == {Way.FUSED, Way.SEGMENTS, Way.PLAIN}
    monkeypatch.setattr(engines.tuning, "step_milliseconds", lambda *_: pytest.fail("timed again"))
    again = engine_of(policy, decoding=decoding)
    remembered, _ = again.play(requests, Sampling())
    assert again.timings == engine.timings
    assert [row.tokens for row in remembered] == [row.tokens for row in timed]
    repeatable = engine_of(policy, decoding=replace(decoding, repeatable=True, timings_file=None))
    repeatable.play(requests, Sampling())
    assert repeatable.timings == {}


def adapted():
    """A policy whose adapter does something."""
    policy = tiny()
    for name, module in policy.model.named_modules():
        if isinstance(module, LoRALinear):
            key = mx.random.key(len(name))
            module.lora_b = mx.random.normal(module.lora_b.shape, scale=0.05, key=key)
    return policy


@pytest.mark.parametrize("compile_when", ["never", "always"])
def test_a_policy_that_learned_is_sampled_as_it_is_now(compile_when):
    policy = adapted()
    engine = engine_of(policy, decoding=Decoding(compile_when=compile_when, merge_adapter="auto"))
    requests = some_requests("arithmetic")
    before, _ = engine.play(requests, Sampling())
    for _, module in policy.model.named_modules():
        if isinstance(module, LoRALinear):
            module.lora_b = -4 * module.lora_b
    after, _ = engine.play(requests, Sampling())
    assert [row.tokens for row in before] != [row.tokens for row in after]
    batch = collate([Group("all", tuple(after))])
    logp = token_outputs(policy.model, batch, 1.0).logp
    assert mx.abs(logp - batch.sampler_logp).max().item() < 1e-4


def test_an_adapter_is_merged_for_the_rollout_alone():
    policy = adapted()
    engine = engine_of(policy, decoding=Decoding(merge_adapter="auto"))
    before = base_hash(policy.model)
    assert engine.merges and "one weight" in engine.merge_reason
    engine.play(some_requests("arithmetic"), Sampling())
    assert base_hash(policy.model) == before
    assert any(isinstance(module, LoRALinear) for _, module in policy.model.named_modules())


def test_an_adapter_is_not_merged_into_quantised_weights_nor_beyond_the_memory():
    quantised = tiny(precision="4bit")
    engine = engine_of(quantised, decoding=Decoding(merge_adapter="auto"))
    assert not engine.merges and "quantised" in engine.merge_reason
    unpacked = engine_of(quantised, decoding=Decoding(merge_adapter="always"))
    assert unpacked.merges
    for either in (engine, unpacked):
        trajectories, _ = either.play(some_requests("arithmetic"), Sampling())
        batch = collate([Group("all", tuple(trajectories))])
        logp = token_outputs(quantised.model, batch, 1.0).logp
        assert mx.abs(logp - batch.sampler_logp).max().item() < 1e-4
    small = engine_of(tiny(), decoding=Decoding(merge_adapter="auto", memory_bytes=1_000_000))
    assert not small.merges and "60%" in small.merge_reason
    assert engine_of(tiny(), decoding=Decoding(merge_adapter="always", memory_bytes=1)).merges


def test_what_is_kept_is_what_the_shapes_say(monkeypatch):
    policy = tiny()
    limits = {"max_completion_tokens": 40, "ignore_eos": True}
    requests = some_requests("arithmetic", tasks=4, members=8)
    trajectories, statistics = engine_of(policy, **limits).play(requests, Sampling())
    longest = max(len(row.turns[0].context) for row in trajectories) + 40
    config = policy.config
    predicted = kv_bytes(
        layers=config["num_hidden_layers"], kv_heads=config["num_key_value_heads"], head_size=config["head_dim"],
        number_bytes=4, rows=32, tokens=longest,
    )  # fmt: skip
    assert abs(statistics.highest_kept_bytes - predicted) <= 0.02 * predicted


def test_a_small_bound_on_what_is_kept_means_fewer_rows(monkeypatch):
    spy = Spy(monkeypatch)
    policy = tiny()
    row = engine_of(policy).row_bytes(256)
    engine = engine_of(policy, decoding=Decoding(max_cache_bytes=3 * row + 1), max_episode_tokens=256)
    trajectories, statistics = engine.play(some_requests("recurring", tasks=3), Sampling())
    assert len(trajectories) == 12 and max(spy.steps) == 3
    assert statistics.highest_kept_bytes <= 3 * row


def test_the_bound_on_what_is_kept_counts_prompts_for_members_to_come_and_episodes_in_threads():
    policy, limits = tiny(), {"max_episode_tokens": 64, "ignore_eos": True}
    row = engine_of(policy).row_bytes(64)
    requests = some_requests("recurring", tasks=4, members=4)
    requests = sorted(requests, key=lambda request: request.member)  # every prompt waits for more of its members
    free, _ = engine_of(policy, **limits).play(requests, Sampling())
    for rows, env_threads in ((4, 0), (5, 3)):
        bounded = Decoding(max_cache_bytes=rows * row, env_threads=env_threads)
        got, statistics = engine_of(policy, decoding=bounded, **limits).play(requests, Sampling())
        assert statistics.highest_kept_bytes <= rows * row
        assert [one.tokens for one in got] == [one.tokens for one in free]


def test_an_episode_in_a_thread_holds_on_to_its_own_row_alone():
    policy, active = tiny(), []

    class Slow(Countdown):
        def step(self, action):
            time.sleep(0.02)
            active.append(mx.get_active_memory())
            return super().step(action)

    requests = [EpisodeRequest("slow", n, Slow, ("slow", n), max_completion_tokens=2 + 3 * n) for n in range(16)]
    engine = engine_of(policy, decoding=Decoding(max_rows=8, env_threads=8), max_completion_tokens=100, ignore_eos=True)
    before = mx.get_active_memory()
    _, statistics = engine.play(requests, Sampling())
    assert max(active) - before < 2.5 * statistics.highest_kept_bytes  # 8 times with all rows of each moment


def test_what_was_compiled_is_used_again(monkeypatch):
    traced, whole_step = [], Stepper._whole_step
    monkeypatch.setattr(Stepper, "_whole_step", lambda me, *given: (traced.append(1), whole_step(me, *given))[1])
    engine = engine_of(tiny(), decoding=Decoding(compile_when="always"))
    requests = some_requests("arithmetic")
    engine.play(requests, Sampling())
    once = len(traced)
    engine.play(requests, Sampling())
    assert once and len(traced) == once


@pytest.mark.parametrize("compile_when", ["never", "always"])
def test_memory_does_not_grow_over_many_rollouts(compile_when):
    policy = tiny()
    engine = engine_of(policy, decoding=Decoding(compile_when=compile_when), ignore_eos=True)
    active = []
    for number in range(200):
        requests = [
            replace(request, max_completion_tokens=1 + (number * 7 + row) % 16)
            for row, request in enumerate(some_requests("arithmetic", tasks=1 + number % 3, members=2, step=number))
        ]
        engine.play(requests, Sampling())
        mx.clear_cache()
        active.append(mx.get_active_memory())
    assert max(active[100:]) <= 1.01 * max(active[20:100])


def test_slow_environments_answer_at_the_same_time_and_change_nothing():
    class Sleeping:
        max_turns = 3

        def __init__(self, member):
            self.member, self.turn = member, 0

        def reset(self):
            return f"red {self.member}"

        def step(self, action):
            time.sleep(0.002 * (self.member % 3))  # they overtake one another
            self.turn += 1
            return StepResult(f"door {self.turn} {action[:3]}", 1.0, False)

        def state_id(self, observation):
            return observation

    requests = [EpisodeRequest("sleep", n, lambda n=n: Sleeping(n), ("sleep", n)) for n in range(12)]
    play = lambda **how: engine_of(tiny(), decoding=Decoding(**how), max_completion_tokens=6).play(requests, Sampling())
    alone, _ = play()
    threaded, statistics = play(max_rows=4, env_threads=5)
    assert [row.tokens for row in threaded] == [row.tokens for row in alone]
    assert [[turn.state for turn in row.turns] for row in threaded] == [
        [turn.state for turn in row.turns] for row in alone
    ]
    assert statistics.env_seconds > 0


def test_an_environment_that_fails_in_a_thread_ends_the_rollout_by_its_name():
    class Failing(Countdown):
        def step(self, action):
            raise ValueError("no such door")

    requests = [EpisodeRequest("broken", member, Failing, (member,)) for member in range(4)]
    with pytest.raises(EnvironmentFailure, match=r"task 'broken', turn 1.*no such door"):
        engine_of(tiny(), decoding=Decoding(env_threads=2)).play(requests, Sampling())


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
    policy = tiny()
    long = "red door " * 40
    requests = [
        EpisodeRequest(str(n), 0, lambda text=text: Countdown(text), ("long", n))
        for n, text in enumerate([long, "red"])
    ]
    whole, _ = engine_of(policy).play(requests, Sampling())
    monkeypatch.setattr(stepping, "PASS_TOKENS", 64)
    pieces, _ = engine_of(policy).play(requests, Sampling())
    assert [row.tokens for row in pieces] == [row.tokens for row in whole]
    batch = collate([Group("all", tuple(pieces))])
    logp = token_outputs(policy.model, batch, 1.0).logp
    assert mx.abs(logp - batch.sampler_logp).max().item() < 1e-4


def test_an_action_ends_with_its_sampled_eos_and_the_eos_is_trained():
    policy = tiny()
    trajectories, _ = engine_of(policy).play(some_requests("arithmetic"), Sampling())
    ended = [turn for row in trajectories for turn in row.turns if turn.stop is StopReason.EOS]
    assert ended
    for turn in ended:
        assert turn.action[-1] in policy.eos_ids and not set(turn.action[:-1]) & policy.eos_ids
        assert len(turn.sampler_logp) == len(turn.action)
    batch = collate([Group("all", tuple(trajectories))])
    last = [row.action_spans()[-1][1] - 1 for row in trajectories]
    assert all(batch.action_mask[row, column].item() for row, column in enumerate(last))


def test_the_cap_ends_an_action_and_the_template_then_closes_it():
    policy = tiny()
    [trajectory], _ = engine_of(policy, max_completion_tokens=2).play(some_requests("recurring", 1, 1), Sampling())
    first, second = trajectory.turns[:2]
    assert first.stop is StopReason.LENGTH and len(first.action) == 2
    assert second.context[0] in policy.eos_ids  # the end mark is context then: read, not trained


def test_a_stop_string_ends_an_action_with_the_token_that_completes_it():
    policy = tiny()
    engine = engine_of(policy, stop_strings=("</action>",))
    trajectories, _ = engine.play(some_requests("recurring"), Sampling())
    stopped = [turn for row in trajectories for turn in row.turns if turn.stop is StopReason.STOP_STRING]
    assert stopped and all(turn.text.endswith("</action>") for turn in stopped)


def test_with_ignore_eos_every_action_runs_to_its_full_length():
    trajectories, _ = engine_of(tiny(), ignore_eos=True, max_completion_tokens=11).play(
        some_requests("arithmetic"), Sampling()
    )
    assert {len(turn.action) for row in trajectories for turn in row.turns} == {11}


def test_an_episode_ends_before_the_turn_that_could_pass_its_token_limit():
    trajectories, _ = engine_of(tiny(), max_episode_tokens=30, max_completion_tokens=8).play(
        some_requests("recurring"), Sampling()
    )
    assert all(len(row.tokens) <= 30 for row in trajectories)
    assert any(row.end is EndReason.MAX_TOKENS and row.final_context for row in trajectories)


def test_a_prompt_over_the_limit_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens=2"):
        engine_of(tiny(), max_prompt_tokens=2).play(some_requests("arithmetic"), Sampling())


def test_a_family_that_keeps_more_than_plain_kv_is_played_one_by_one_and_says_so(monkeypatch):
    monkeypatch.setattr(engines, "kept_by", lambda model: None)
    engine = engine_of(tiny())
    assert engine.mode == "sequential" and "one by one" in engine.mode_reason
    trajectories, _ = engine.play(some_requests("arithmetic", 1, 2), Sampling())
    assert len(trajectories) == 2


def test_an_episode_limit_without_room_for_one_turn_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"rollout\.max_episode_tokens=9 has no room for one turn"):
        engine_of(tiny(), max_episode_tokens=9, max_completion_tokens=8).play(some_requests("arithmetic"), Sampling())


@pytest.mark.parametrize("where", ["open", "decode", "step"])
def test_a_stop_is_heeded_between_tokens_and_between_environments(where):
    stop, calls = StopRequest(), []

    class Stopping(Countdown):
        def __init__(self):
            super().__init__()
            calls.append("open")
            stop.signal_number = 2 if where == "open" else None

        def step(self, action):
            calls.append("step")
            stop.signal_number = 2 if where == "step" else None
            return super().step(action)

        def reset(self):
            stop.signal_number = 2 if where == "decode" and calls.count("open") == 3 else stop.signal_number
            return super().reset()

    policy = tiny()
    engine = RolloutEngine(policy.model, ChatFormat(policy.tokenizer), policy.eos_ids, Limits(8), stop=stop)
    with pytest.raises(Interrupted):
        engine.play([EpisodeRequest("count", member, Stopping, (member,)) for member in range(3)], Sampling())
    assert calls == {"open": ["open"], "decode": ["open"] * 3, "step": ["open"] * 3 + ["step"]}[where]


class Countdown:
    """Ends after three turns; its state is asked for while it is still in it."""

    max_turns = 5

    def __init__(self, opening="start"):
        self.turn, self.opening = 0, opening

    def reset(self):
        return self.opening

    def step(self, action):
        self.turn += 1
        return StepResult(f"turn {self.turn}", 1.0, self.turn == 3)

    def state_id(self, observation):
        return f"state {self.turn} seen as {observation}"


class Once(Countdown):
    """Ends after one turn."""

    max_turns = 1


def test_the_anchor_is_the_state_the_action_was_taken_in_and_not_the_one_it_led_to():
    requests = [EpisodeRequest("count", 0, Countdown, (0,))]
    [trajectory], _ = engine_of(tiny()).play(requests, Sampling())
    assert [turn.state for turn in trajectory.turns] == [
        "state 0 seen as start", "state 1 seen as turn 1", "state 2 seen as turn 2",
    ]  # fmt: skip
    assert trajectory.end is EndReason.ENV_DONE and trajectory.total_reward == 3.0


def test_greedy_takes_the_likeliest_token_whatever_the_key():
    policy = tiny()
    family = settings("env", "arithmetic")
    task = family.held_out_tasks()[0]
    requests = [EpisodeRequest(task, 0, lambda: family.make(task, 0, 0), (key,)) for key in range(5)]
    rows, _ = engine_of(policy).play([replace(request, greedy=True) for request in requests], Sampling())
    assert len({tuple(row.tokens) for row in rows}) == 1
