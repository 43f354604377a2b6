"""The engine against the plain version: full forwards, one row at a time, and counts of what was really fed."""

from dataclasses import replace

import mlx.core as mx
import pytest

from building import engine_of, settings, some_requests, tiny
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.protocols import StepResult
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.core.trajectory import EndReason, Group, StopReason
from mlxrl_runs.errors import ConfigError, Interrupted
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.forward import action_logp
from mlxrl_runs.rollout.decoder import BatchedDecoder, SingleDecoder
from mlxrl_runs.rollout.engine import EpisodeRequest, Limits, RolloutEngine
from mlxrl_runs.rollout.sampling import Sampling

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
    logp, _ = action_logp(policy.model, batch, temperature)
    assert mx.abs(logp - batch.sampler_logp).max().item() < 1e-4


def test_what_a_row_draws_does_not_depend_on_who_shares_its_batch():
    policy = tiny()
    requests = some_requests("recurring", tasks=3)
    whole, _ = engine_of(policy).play(requests, Sampling())
    part, _ = engine_of(policy).play(requests[5:7], Sampling())
    assert [row.tokens for row in part] == [row.tokens for row in whole[5:7]]


def test_h11_siblings_and_steps_draw_differently_and_a_seed_repeats_itself():
    policy = tiny()
    play = lambda **where: [
        row.tokens for row in engine_of(policy).play(some_requests("recurring", tasks=1, **where), Sampling())[0]
    ]
    first = play(step=1)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert play(step=2) != first
    assert play(step=1) == first
    assert play(step=1, seed=1) != first


class Spy:
    """Counts what a decoder was fed."""

    def __init__(self, monkeypatch, decoder=BatchedDecoder):
        self.feeds, self.steps = [], []
        feed, step = decoder.feed, decoder.step
        monkeypatch.setattr(
            decoder, "feed", lambda me, tokens: (self.feeds.append([len(r) for r in tokens]), feed(me, tokens))[1]
        )
        monkeypatch.setattr(
            decoder, "step", lambda me, tokens, growing: (self.steps.append(len(growing)), step(me, tokens, growing))[1]
        )


def test_each_distinct_prompt_is_prefilled_once(monkeypatch):
    spy = Spy(monkeypatch)
    engine_of(tiny()).play(some_requests("arithmetic", tasks=3, members=8), Sampling())
    assert len(spy.feeds) == 1 and len(spy.feeds[0]) == 3  # 24 rows, 3 prompts


def test_no_token_is_read_twice(monkeypatch):
    spy = Spy(monkeypatch, SingleDecoder)
    [trajectory], _ = engine_of(tiny(), mode="sequential").play(some_requests("recurring", 1, 1), Sampling())
    assert len(trajectory.turns) > 1
    # everything but the very last sampled token was fed, and fed once
    assert sum(sum(rows) for rows in spy.feeds) + len(spy.steps) == len(trajectory.tokens) - 1


def test_rows_that_ended_leave_the_batch(monkeypatch):
    spy = Spy(monkeypatch)
    engine_of(tiny()).play(some_requests("arithmetic", tasks=8, members=8), Sampling())
    assert spy.steps[0] >= 48 and spy.steps[-1] < 32


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
    monkeypatch.setattr(BatchedDecoder, "supports", staticmethod(lambda model: False))
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

    def __init__(self):
        self.turn = 0

    def reset(self):
        return "start"

    def step(self, action):
        self.turn += 1
        return StepResult(f"turn {self.turn}", 1.0, self.turn == 3)

    def state_id(self, observation):
        return f"state {self.turn} seen as {observation}"


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
