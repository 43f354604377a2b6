"""Plays many episodes through a fixed number of rows that are decoded together, and keeps those rows busy.

A row whose action ended is answered by its environment at once. At the next fixed point, reached when a quarter of the
rows have something to read, the next turns are read into the kept KV, new episodes take the place of those that ended,
and all of them write on. Which rows share a batch is a function of what was sampled, never of a clock.
"""

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import mlx.core as mx

from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.maths.scalars import integers, numbers
from mlxrl_runs.rollout.episodes import Episode, EpisodeRequest, Referee, Reply
from mlxrl_runs.rollout.layers import Keeps
from mlxrl_runs.rollout.rows import Rows
from mlxrl_runs.rollout.sampling import row_keys
from mlxrl_runs.rollout.statistics import RolloutStatistics
from mlxrl_runs.rollout.stepping import Cursor, Stepper, Written

READ_FROM = 0.25  # rows with something to read, as a share of those in use, from which the others wait for them
WAIT_SECONDS = 0.1  # between two looks at whether a signal has asked for an end


@dataclass
class _Parked:
    """An episode whose environment is answering in a thread, and what the model keeps of it."""

    episode: Episode
    kept: Rows
    reply: Future[Reply]


@dataclass
class _Prompt:
    """A prompt that was read, for the members of its group: row `row` of what was read with it."""

    task: str
    kept: Rows
    logits: mx.array
    row: int


def _alone(together: Sequence[tuple[tuple[int, ...], _Prompt]]) -> dict[tuple[int, ...], _Prompt]:
    """These prompts without the others that were read with them."""
    rows = [prompt.row for _, prompt in together]
    first = together[0][1]
    kept, logits = first.kept.select(rows), first.logits[mx.array(rows)]
    mx.async_eval(kept.kept, logits)  # copies still to be made would hold on to all of them
    return {tokens: _Prompt(prompt.task, kept, logits, row) for row, (tokens, prompt) in enumerate(together)}


@dataclass
class Slots:
    """Attributes:
    count: rows decoded together. in_flight: episodes begun and not ended, those in threads included.
    read_every: steps queued before the oldest is looked at. pool: where slow environments answer; None: here.
    prompt_bytes: of prompts kept for members to come; what is over it is read again. None: no limit.
    """

    stepper: Stepper
    referee: Referee
    stop: StopRequest
    kinds: tuple[Keeps, ...]
    count: int
    in_flight: int
    read_every: int
    statistics: RolloutStatistics
    pool: ThreadPoolExecutor | None = None
    prompt_bytes: int | None = None
    _rows: Rows = field(init=False)
    _queue: deque[EpisodeRequest] = field(default_factory=deque)
    _tasks_left: Counter[str] = field(default_factory=Counter)
    _begun: list[Episode] = field(default_factory=list)
    _holders: list[Episode | None] = field(default_factory=list)
    _writing: set[int] = field(default_factory=set)  # slots
    _reading: list[int] = field(default_factory=list)  # slots whose next context is there
    _parked: deque[_Parked] = field(default_factory=deque)
    _prompts: dict[tuple[int, ...], _Prompt] = field(default_factory=dict)

    def play(self, requests: Sequence[EpisodeRequest]) -> list[Episode]:
        """Every request played to its end, in their order. Raises: see `Referee`; Interrupted."""
        self._queue = deque(requests)
        self._tasks_left = Counter(request.task for request in requests)
        self._holders = [None] * self.count
        self._rows = Rows.empty(self.kinds, self.count, 1)
        while self._queue or self._parked or any(self._holders):
            self._fill()
            self._decode()
        return self._begun

    # ---- between two stretches of decoding

    def _fill(self) -> None:
        """Give every row something to write, as far as there is something."""
        self._note_bytes()  # before parked episodes come back
        if self._may_shrink():
            self._shrink()
        fresh, parked = self._next_episodes()
        if parked:
            self._rows.put([slot for slot, _ in parked], Rows.joined([kept for _, kept in parked]))
        reading, self._reading = sorted([*self._reading, *(slot for slot, _ in parked)]), []
        self._read_on(reading)
        self._read_first(fresh)
        self._note_bytes()

    def _note_bytes(self) -> None:
        kept = self._rows.bytes + sum(waiting.kept.bytes for waiting in self._parked) + self._bytes_of_prompts()
        self.statistics.highest_kept_bytes = max(self.statistics.highest_kept_bytes, kept)

    def _held(self) -> list[int]:
        return [slot for slot, episode in enumerate(self._holders) if episode is not None]

    def _episode(self, slot: int) -> Episode:
        episode = self._holders[slot]
        assert episode is not None
        return episode

    def _may_shrink(self) -> bool:
        return 0 < len(self._held()) <= self.count // 2 and not self._queue and not self._parked

    def _shrink(self) -> None:
        """Halve the rows while half of them are empty: few different numbers, so that few shapes are compiled."""
        held = self._held()
        while len(held) <= self.count // 2:
            self.count //= 2
        spare = self.count - len(held)
        self._rows = self._rows.select([*held, *([held[0]] * spare)])
        self._rows.lengths[len(held) :] = [0] * spare
        self._holders = [self._holders[slot] for slot in held] + [None] * spare
        self._writing = {held.index(slot) for slot in self._writing}
        self._reading = [held.index(slot) for slot in self._reading]

    def _next_episodes(self) -> tuple[list[int], list[tuple[int, Rows]]]:
        """Fill the empty rows: (slots with new episodes, slots with those that were parked and what is kept of them).

        New ones come first while they may be in flight; then the one that has waited longest, however fast its
        environment was.
        """
        fresh: list[int] = []
        parked: list[tuple[int, Rows]] = []
        for slot in range(self.count):
            while self._holders[slot] is None and (self._queue or self._parked):
                self.stop.raise_if_requested()
                in_flight = len(self._held()) + len(self._parked)
                if self._queue and (in_flight < self.in_flight or not self._parked):
                    self._holders[slot] = self._open(self._queue.popleft())
                    fresh.append(slot)
                    continue
                waiting = self._parked.popleft()
                self.referee.settle(waiting.episode, self._awaited(waiting.reply))
                if waiting.episode.end is None:
                    self._holders[slot] = waiting.episode
                    parked.append((slot, waiting.kept))
        return fresh, parked

    def _open(self, request: EpisodeRequest) -> Episode:
        with self.statistics.env_time():
            episode = self.referee.open(request)
        self._begun.append(episode)
        self._tasks_left[request.task] -= 1
        return episode

    def _awaited(self, reply: Future[Reply]) -> Reply:
        with self.statistics.env_time():
            while not reply.done():
                self.stop.raise_if_requested()
                wait([reply], timeout=WAIT_SECONDS)
            return reply.result()

    # ---- reading

    def _read_on(self, slots: Sequence[int]) -> None:
        """Let rows read what follows the action they wrote last."""
        if not slots:
            return
        episodes = [self._episode(slot) for slot in slots]
        part = self._rows if len(slots) == self.count else self._rows.select(slots)
        contexts = [episode.to_read for episode in episodes]
        for length, context, episode in zip(part.lengths, contexts, episodes, strict=True):
            assert length + len(context) == episode.tokens, "the rows hold other tokens than the trajectory"
        part.make_room(max(episode.tokens + episode.max_completion_tokens for episode in episodes))
        logits = self.stepper.read(part, contexts)
        if part is not self._rows:
            self._rows.put(slots, part)
        self._write_first(slots, logits)

    def _read_first(self, slots: Sequence[int]) -> None:
        """Read every new prompt once, and hand what is kept of it to all rows that begin with it."""
        wanted = {slot: self._episode(slot) for slot in slots}
        new = {
            episode.context.tokens: episode.request.task
            for episode in wanted.values()
            if episode.context.tokens not in self._prompts
        }
        if new:
            limit = max(episode.max_completion_tokens for episode in wanted.values())
            kept = Rows.empty(self.kinds, len(new), max(map(len, new)) + limit)
            logits = self.stepper.read(kept, list(new))
            for row, (prompt, task) in enumerate(new.items()):
                self._prompts[prompt] = _Prompt(task, kept, logits, row)
        read_together: dict[int, list[int]] = {}
        for slot, episode in wanted.items():
            read_together.setdefault(id(self._prompts[episode.context.tokens].kept), []).append(slot)
        for together in read_together.values():
            prompts = [self._prompts[wanted[slot].context.tokens] for slot in together]
            rows = [prompt.row for prompt in prompts]
            self._rows.put(together, prompts[0].kept, rows)
            self._write_first(together, prompts[0].logits[mx.array(rows)])
        self._prompts = self._for_members_to_come()

    def _for_members_to_come(self) -> dict[tuple[int, ...], _Prompt]:
        """The prompts that others will begin with, as far as there is room for them."""
        read_together: dict[int, list[tuple[tuple[int, ...], _Prompt]]] = {}
        for tokens, prompt in self._prompts.items():
            if self._tasks_left[prompt.task]:
                read_together.setdefault(id(prompt.kept), []).append((tokens, prompt))
        found: dict[tuple[int, ...], _Prompt] = {}
        room = 2**62 if self.prompt_bytes is None else self.prompt_bytes
        for together in read_together.values():
            kept, rows = together[0][1].kept, [prompt.row for _, prompt in together]
            share = kept.bytes * len(rows) // len(kept.lengths)
            if share > room:
                continue
            room -= share
            found |= dict(together) if len(rows) == len(kept.lengths) else _alone(together)
        return found

    def _bytes_of_prompts(self) -> int:
        return sum({id(prompt.kept): prompt.kept.bytes for prompt in self._prompts.values()}.values())

    # ---- writing

    def _write_first(self, slots: Sequence[int], logits: mx.array) -> None:
        """Draw the first token of an action from the logits behind what it answers."""
        keys, greedy = self._draws(slots)
        new = self.stepper.draw(logits, keys, mx.zeros(len(slots), dtype=mx.int32), greedy)
        self._writing.update(slots)
        self._take(slots, Written(new.tokens, new.logp, new.margin))

    def _draws(self, slots: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Keys and greediness of these rows; those of empty ones count for nothing."""
        episodes = [self._holders[slot] for slot in slots]
        keys = row_keys([() if episode is None else episode.draws for episode in episodes])
        return keys, mx.array([episode is not None and episode.request.greedy for episode in episodes])

    def _take(self, slots: Sequence[int], written: Written) -> None:
        """Write down what a step gave to these slots, in the order of `written`; those that had ended take nothing."""
        tokens, logps = integers(written.tokens), numbers(written.logp)
        margins = None if written.margin is None else numbers(written.margin)
        for place, slot in enumerate(slots):
            if slot not in self._writing:
                continue
            episode = self._episode(slot)
            self.referee.append(episode, tokens[place], logps[place])
            self.statistics.note(episode.request.key, None if margins is None else margins[place])
            if episode.action.stop is not None:
                self._writing.remove(slot)
                self._answer(slot)

    def _answer(self, slot: int) -> None:
        """Let the environment answer the action that ended, here or in a thread."""
        self.stop.raise_if_requested()
        episode = self._episode(slot)
        if self.pool is not None:
            kept = self._rows.select([slot])
            mx.async_eval(kept.kept)  # a copy still to be made would hold on to all rows as they are now
            self._parked.append(_Parked(episode, kept, self.pool.submit(self.referee.ask, episode)))
            self._release(slot)
            return
        with self.statistics.env_time():
            self.referee.settle(episode, self.referee.ask(episode))
        if episode.end is None:
            self._reading.append(slot)
        else:
            self._release(slot)

    def _release(self, slot: int) -> None:
        self._holders[slot] = None
        self._rows.lengths[slot] = 0

    def _decode(self) -> None:
        """Step until it is time to read again. The next step is queued before the last one is looked at."""
        if not self._writing or self._is_time_to_read():
            return
        cursor = self._cursor()
        left = max(self._left(slot) for slot in self._writing)
        ahead = 0 if self._must_look else self.read_every
        queued: deque[Written] = deque()
        while self._writing and not self._is_time_to_read():
            self.stop.raise_if_requested()
            if left > 0:
                cursor, written = self.stepper.step(self._rows, cursor)
                queued.append(written)
                left -= 1
            if left == 0 or len(queued) >= 2 * ahead:
                for _ in range(min(max(ahead, 1), len(queued))):
                    self._look(queued.popleft())
                if self._must_look:
                    cursor = replace(cursor, active=cursor.active & mx.array(self._who_writes()))
        while queued:
            self._look(queued.popleft())

    def _who_writes(self) -> list[bool]:
        return [slot in self._writing for slot in range(self.count)]

    def _left(self, slot: int) -> int:
        episode = self._episode(slot)
        return episode.max_completion_tokens - len(episode.action.tokens)

    @property
    def _must_look(self) -> bool:
        """Stop strings are found here, not on the device; states that read on behind one could not be turned back."""
        return self.referee.has_stop_strings and Keeps.STATES in self.kinds

    def _look(self, written: Written) -> None:
        for slot in self._writing:
            self._rows.lengths[slot] += 1
        self._take(range(self.count), written)

    def _is_time_to_read(self) -> bool:
        held = len(self._held())
        empty, outside = self.count - held, len(self._queue) + len(self._parked)
        waiting = len(self._reading) + min(empty, outside)
        last_ones_fit = 0 < len(self._queue) <= empty
        return waiting >= READ_FROM * min(self.count, held + outside) or last_ones_fit or self._may_shrink()

    def _cursor(self) -> Cursor:
        """What the device needs to know of every row."""
        slots = range(self.count)
        writing = self._who_writes()
        actions = [
            self._episode(slot).action.tokens if writes else [] for slot, writes in zip(slots, writing, strict=True)
        ]
        lengths = self._rows.lengths
        levels = {lengths[slot] for slot in self._writing}
        self._rows.make_room(max(lengths[slot] + self._left(slot) + 1 for slot in self._writing))
        keys, greedy = self._draws(slots)
        return Cursor(
            tokens=mx.array([action[-1] if action else 0 for action in actions], dtype=mx.int32),
            lengths=mx.array(lengths, dtype=mx.int32),
            active=mx.array(writing),
            drawn=mx.array([len(action) for action in actions], dtype=mx.int32),
            limits=mx.array(
                [self._episode(slot).max_completion_tokens if writing[slot] else 0 for slot in slots], dtype=mx.int32
            ),
            keys=keys,
            greedy=greedy,
            longest=max(levels),
            # a row that waits keeps what it has read only where the others write behind it
            is_level=len(levels) == 1 and max(lengths) <= max(levels),
        )
