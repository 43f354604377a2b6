"""A numbered set of tasks with a fixed part held out, for environments whose tasks can be counted."""

import random
from collections.abc import Callable, Sequence
from functools import cached_property

from mlxrl_runs.core.seeding import generator

HELD_OUT_LIMIT = 2000  # enough to score on, quick to list


class TaskSpace:
    """Tasks 0 .. count - 1, of which a fixed random part is never trained on.

    Args:
        name: names the held-out draw; equal names and counts hold out the same tasks on every machine.
        count: how many tasks exist.
        task: the id of task number i; ids are distinct.
        held_out_fraction: share held out, HELD_OUT_LIMIT tasks at most.
    """

    def __init__(self, name: str, count: int, task: Callable[[int], str], held_out_fraction: float):
        self.name = name
        self.count = count
        self.task = task
        self.held_out_count = min(int(count * held_out_fraction), HELD_OUT_LIMIT)

    def check(self) -> None:
        """Raises: ValueError when there is nothing to train on, or nothing to evaluate."""
        if not 0 < self.held_out_count < self.count:
            missing = "evaluate on" if self.held_out_count == 0 else "train on"
            raise ValueError(f"held_out_fraction leaves no task to {missing}: {self.count} exist; try 0.1")

    @cached_property
    def held_out(self) -> Sequence[str]:
        draw = generator("held out", self.name, self.count)
        return [self.task(number) for number in draw.sample(range(self.count), self.held_out_count)]

    @cached_property
    def _held_out_set(self) -> frozenset[str]:
        return frozenset(self.held_out)

    def sample(self, stream: random.Random) -> str:
        """A training task."""
        while (task := self.task(stream.randrange(self.count))) in self._held_out_set:
            pass
        return task
