"""Samples trajectories from a model: the front door of the rollout."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrl_runs.core.protocols import Environment, Scorer, StepResult
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.core.trajectory import Trajectory
from mlxrl_runs.policy.adapters import adapters_merged, merged_bytes
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.precision import is_quantised
from mlxrl_runs.rollout import tuning
from mlxrl_runs.rollout.episodes import Episode, EpisodeRequest, Limits, Referee
from mlxrl_runs.rollout.layers import kept_by
from mlxrl_runs.rollout.one_by_one import play_one
from mlxrl_runs.rollout.plan import Plan, Way, choose, read_every
from mlxrl_runs.rollout.probe import why_not_batched
from mlxrl_runs.rollout.rows import Rows
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.rollout.slots import Slots
from mlxrl_runs.rollout.statistics import RolloutStatistics
from mlxrl_runs.rollout.stepping import Stepper

MERGE_SHARE = 0.6  # of the memory, up to which merged weights are worth their place


@dataclass(frozen=True)
class Decoding:
    """How an engine decodes; none of it changes what is drawn, up to rounding.

    Attributes:
        mode: "batched" decodes rows together; "sequential" plays one episode after the other, and needs the memory of
            one row.
        compile_when: "auto", "always", "never"; see `plan.choose`, also for `expected_steps`.
        tune: choose between ways to decode by a short timing: "auto" on a GPU, "always" on a CPU too, or "never".
        repeatable: no choice by a clock, and only ways that give the same bits every time.
        merge_adapter: "auto", "always", "never": sample with base + adapter as one weight.
        max_rows: decoded together; None for as many as there are episodes.
        max_cache_bytes: of keys, values and states, of rows, of episodes in threads and of prompts kept for members to
            come; fewer rows are decoded together where they would take more.
        env_threads: environments answering at once; 0 lets them answer one after the other, between two tokens.
        memory_bytes: of the machine; None where nobody knows.
        timings_file: where timings are kept from one run to the next; None to forget them.
    """

    mode: str = "batched"
    compile_when: str = "never"
    expected_steps: int | None = None
    tune: str = "never"
    repeatable: bool = False
    merge_adapter: str = "never"
    max_rows: int | None = None
    max_cache_bytes: int | None = None
    env_threads: int = 0
    memory_bytes: int | None = None
    timings_file: Path | None = None


class RolloutEngine:
    """Plays episodes: the model writes, the environment answers, and what was read is kept.

    Args: scorer: turns what environments pay into the run's reward; None leaves it as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        chat: ChatFormat,
        eos_ids: frozenset[int],
        limits: Limits,
        decoding: Decoding = Decoding(),
        stop: StopRequest | None = None,
        scorer: Scorer | None = None,
    ):
        self._model = model
        self.chat = chat
        self._limits = limits
        self._decoding = decoding
        self._stop = stop or StopRequest()
        self._referee = Referee(chat, eos_ids, limits, scorer)
        self._kinds = kept_by(model)
        self.mode, self.mode_reason = decoding.mode, "as configured"
        if self.mode == "batched" and (reason := self._why_one_by_one()):
            self.mode, self.mode_reason = "sequential", f"{reason}: episodes run one by one"
        self.plan: Plan = choose(model, decoding.compile_when, decoding.expected_steps, decoding.repeatable)
        self.merges, self.merge_reason = self._merging()
        self.timings: dict[int, dict[str, float]] = {}  # milliseconds a step by way, by rows
        self._steppers: list[tuple[tuple[object, ...], Stepper]] = []  # by what they were made for

    def _why_one_by_one(self) -> str | None:
        if self._kinds is None:
            return "this model family keeps more than keys, values and states"
        return why_not_batched(self._model, self._kinds)

    def _merging(self) -> tuple[bool, str]:
        """Whether to sample with base + adapter as one weight, and why."""
        wish, extra = self._decoding.merge_adapter, merged_bytes(self._model)
        if wish == "never" or extra == 0:
            return False, "rollout.merge_adapter=never" if extra else "no adapter"
        if wish == "auto" and is_quantised(self._model):
            return False, "the base is quantised and a merged copy would not be: rollout.merge_adapter=always"
        memory = self._decoding.memory_bytes
        if wish == "auto" and memory is not None and self._model_bytes() + extra > MERGE_SHARE * memory:
            return False, f"weights and merged copies would take over {MERGE_SHARE:.0%} of the memory"
        return True, f"base + adapter in one weight, in {extra / 2**20:,.0f} MiB beside the model's own"

    def _model_bytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self._model.parameters()))

    def choices(self) -> dict[str, object]:
        """What was chosen and why, for run.json."""
        return {
            "rollout_mode": self.mode,
            "rollout_mode_reason": self.mode_reason,
            "rollout_way": self.plan.way.value,
            "rollout_way_reason": self.plan.reason,
            "adapter_merged": self.merges,
            "adapter_merged_reason": self.merge_reason,
        }

    def play(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        rows: int | None = None,
        with_margins: bool = False,
    ) -> tuple[list[Trajectory], RolloutStatistics]:
        """Play every request to its end.

        Args: rows: decoded together at most, where that is fewer than the engine's own limit.
        Returns: trajectories in the order of the requests, and what they cost.
        Raises: ConfigError for a prompt over the limit; EnvironmentFailure when an environment fails; Interrupted.
        """
        started = time.perf_counter()
        statistics = RolloutStatistics(margins={} if with_margins else None)
        with adapters_merged(self._model) if self.merges else nullcontext():
            if self.mode == "batched":
                episodes = self._play_together(requests, sampling, rows, statistics)
            else:
                episodes = [
                    play_one(self._model, self._referee, self._stop, request, sampling, statistics)
                    for request in requests
                ]
        statistics.total_seconds = time.perf_counter() - started
        return [episode.trajectory() for episode in episodes], statistics

    def _play_together(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        rows: int | None,
        statistics: RolloutStatistics,
    ) -> list[Episode]:
        assert self._kinds is not None
        threads, most = self._decoding.env_threads, self._affordable_rows()
        if threads and most is not None:
            most = max(most // 2, 1)  # an episode that waits for its answer is kept beside the rows
        count = min(limit for limit in (len(requests), rows, self._decoding.max_rows, most) if limit is not None)
        in_flight = min(count + threads, most or 2**62)
        way = self._way_for(count, sampling)
        with self._threads() as pool, self._stepping(way, sampling, statistics.margins is not None) as stepper:
            slots = Slots(
                stepper=stepper,
                referee=self._referee,
                stop=self._stop,
                kinds=self._kinds,
                count=count,
                in_flight=in_flight,
                read_every=read_every(self._limits.max_completion_tokens),
                statistics=statistics,
                pool=pool,
                prompt_bytes=self._left_of_limit(count + in_flight if threads else count),
            )
            return slots.play(requests)

    @contextmanager
    def _threads(self) -> Iterator[ThreadPoolExecutor | None]:
        """Where slow environments answer. What still waits there is dropped when playing ends early."""
        if not self._decoding.env_threads:
            yield None
            return
        pool = ThreadPoolExecutor(self._decoding.env_threads, thread_name_prefix="environment")
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _stepping(self, way: Way, sampling: Sampling, with_margins: bool) -> Iterator[Stepper]:
        """A stepper with the weights of now."""
        stepper = self._stepper(way, sampling, with_margins)
        stepper.begin()
        try:
            yield stepper
        finally:
            stepper.end()

    def _stepper(self, way: Way, sampling: Sampling, with_margins: bool = False) -> Stepper:
        """It is kept, with what it compiled, for the next rollout."""
        assert self._kinds is not None
        wanted = (way, sampling, with_margins)
        stepper = next((stepper for known, stepper in self._steppers if known == wanted), None)
        if stepper is None:
            stepper = Stepper(self._model, self._kinds, way, sampling, self._referee.eos_ids, with_margin=with_margins)
            self._steppers.append((wanted, stepper))
        return stepper

    def _way_for(self, rows: int, sampling: Sampling) -> Way:
        """The plan's way, or the fastest where a timing may choose. Timed for the next power of two of the rows."""
        wish, on_cpu = self._decoding.tune, mx.default_device().type == mx.DeviceType.cpu
        if wish == "never" or (wish == "auto" and on_cpu) or self._decoding.repeatable or not self.plan.others:
            return self.plan.way
        rows = 2 ** (rows - 1).bit_length()
        if rows not in self.timings:
            self.timings[rows] = self._timed(rows, sampling)
        return Way(min(self.timings[rows], key=lambda way: self.timings[rows][way]))

    def _timed(self, rows: int, sampling: Sampling) -> dict[str, float]:
        memory = None if self._decoding.timings_file is None else tuning.Memory(self._decoding.timings_file)
        key = tuning.key_of(self._model, rows)
        known = None if memory is None else memory.recall(key)
        ways = (self.plan.way, *self.plan.others)
        if known is not None and set(known) == set(ways):
            return known
        found: dict[str, float] = {
            way.value: tuning.step_milliseconds(self._stepper(way, sampling), rows) for way in ways
        }
        if memory is not None:
            memory.keep(key, found)
        return found

    def _affordable_rows(self) -> int | None:
        """Rows whose episodes may grow to the limit within `max_cache_bytes`, at least one; None without a limit."""
        limit = self._decoding.max_cache_bytes
        if limit is None:
            return None
        return max(limit // self._longest_row_bytes, 1)

    def _left_of_limit(self, rows: int) -> int | None:
        """What `max_cache_bytes` leaves beside so many rows; None without a limit."""
        limit = self._decoding.max_cache_bytes
        return None if limit is None else limit - rows * self._longest_row_bytes

    @cached_property
    def _longest_row_bytes(self) -> int:
        """Measured once: it takes a forward pass."""
        return self.row_bytes(self._limits.max_episode_tokens)

    def row_bytes(self, tokens: int) -> int:
        """What the model keeps of one row with room for `tokens` tokens: measured on a row of one token."""
        assert self._kinds is not None, "episodes are played one by one"
        row = Rows.empty(self._kinds, 1, tokens)
        Stepper(self._model, self._kinds, Way.PLAIN, Sampling(), frozenset()).read(row, [[0]])
        return row.bytes

    def step(
        self, environment: Environment, text: str, where: str, *, prompt: str, task: str, token_count: int
    ) -> StepResult:
        """See `Referee.step`."""
        return self._referee.step(environment, text, where, prompt=prompt, task=task, token_count=token_count)
