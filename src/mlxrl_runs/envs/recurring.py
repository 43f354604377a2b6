"""Doors: a multi-turn world whose states recur within an episode and across the episodes of a group.

A task is a row of coloured doors. Each colour always opens with the same verb; which one has to be found out by trying.
A wrong verb leaves you in front of the same door, so its state comes back: GiGPO's anchors.
"""

import random
import re
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mlxrl_runs.core import registry
from mlxrl_runs.core.protocols import StepResult
from mlxrl_runs.core.settings import Int, NonNegative, PositiveInt, Recommended, Settings, UnitInterval
from mlxrl_runs.core.task_space import TaskSpace

COLOURS = ("red", "blue", "green", "gold", "black", "white", "pink", "grey", "brown", "violet", "cyan", "orange")
VERBS = ("push", "pull", "lift", "slide", "twist", "knock")
ACTION = re.compile(r"\s*<action>([a-z]+)</action>\s*")


class RewardShape(StrEnum):
    DENSE = "dense"
    SPARSE = "sparse"


@registry.environment("recurring")
class Recurring(Settings):
    """The doors world: colours ** rooms tasks, of which a fixed tenth is held out.

    Attributes:
        rooms: doors to open in one episode.
        colours: how many colours doors are drawn from, with replacement.
        verbs: how many verbs there are; colour number i opens with verb number i modulo `verbs`.
        max_turns: actions in one episode.
        reward: dense pays room_reward for each new room and exit_reward at the end; sparse pays the exit alone.
        malformed_penalty: taken off for an action that is no `<action>verb</action>`, under either reward.
        held_out_fraction: share of all tasks that is never trained on.
        explain: put the rules before the first observation; for models that do not know the format yet.
        show_verbs: with explain, also say which verb opens which colour: a task of reading, not of finding out.
        answer_prefix: what every answer begins with ("<action>"); the model goes on from there. Empty: nothing.
    """

    gives_answers: ClassVar[bool] = False  # several actions are right or wrong, by the door

    name: Literal["recurring"]
    rooms: Annotated[Int, Field(ge=1, le=8)]
    colours: Annotated[Int, Field(ge=2, le=len(COLOURS))]
    verbs: Annotated[Int, Field(ge=2, le=len(VERBS))]
    max_turns: PositiveInt
    reward: RewardShape
    room_reward: NonNegative
    exit_reward: NonNegative
    malformed_penalty: NonNegative
    held_out_fraction: UnitInterval
    explain: bool
    show_verbs: bool
    answer_prefix: str
    recommended: Recommended

    @model_validator(mode="after")
    def _winnable(self) -> "Recurring":
        if self.max_turns < self.rooms:
            raise ValueError(f"max_turns={self.max_turns} cannot open rooms={self.rooms} doors; raise it to >= rooms")
        if self.show_verbs and not self.explain:
            raise ValueError("show_verbs=true adds to what explain=true says; give both")
        self._space.check()
        return self

    def verb_of(self, colour: str) -> str:
        """The one verb that opens a door of this colour."""
        return VERBS[COLOURS.index(colour) % self.verbs]

    def sample_task(self, generator: random.Random) -> str:
        return self._space.sample(generator)

    def held_out_tasks(self) -> Sequence[str]:
        return self._space.held_out

    def make(self, task: str, seed: int, group_index: int) -> "Doors":
        return Doors(self, task.split("-"))

    @cached_property
    def _space(self) -> TaskSpace:
        return TaskSpace(f"recurring {self.rooms}", self.colours**self.rooms, self._task, self.held_out_fraction)

    def _task(self, number: int) -> str:
        digits = []
        for _ in range(self.rooms):
            number, digit = divmod(number, self.colours)
            digits.append(COLOURS[digit])
        return "-".join(digits)


class Doors:
    """One episode: the doors of one task, opened one after the other."""

    def __init__(self, world: Recurring, doors: Sequence[str]):
        self.max_turns = world.max_turns
        self.answer_prefix = world.answer_prefix
        self._world = world
        self._doors = doors
        self._room = 0

    def reset(self) -> str:
        self._room = 0
        return (self._rules() + "\n" if self._world.explain else "") + self._observation()

    def step(self, action: str) -> StepResult:
        match = ACTION.fullmatch(self.answer_prefix + action)
        if match is None:
            return self._result({"malformed": -self._world.malformed_penalty})
        if match[1] != self._world.verb_of(self._doors[self._room]):
            return self._result({})
        self._room += 1
        if self._room == len(self._doors):
            return self._result({"exit": self._world.exit_reward})
        return self._result({"room": self._world.room_reward if self._world.reward is RewardShape.DENSE else 0.0})

    def state_id(self, observation: str) -> str:
        """Layout and room: what the right action depends on. No turn counter, so a door met again is the same state."""
        return f"{'-'.join(self._doors)}@{self._room}"

    def oracle_action(self) -> str:
        return self._action(self._world.verb_of(self._doors[self._room]))

    def random_action(self, generator: random.Random) -> str:
        return self._action(generator.choice(VERBS[: self._world.verbs]))

    def _action(self, verb: str) -> str:
        """What the model would have to write behind the prefix."""
        return f"<action>{verb}</action>".removeprefix(self.answer_prefix)

    def _result(self, paid: dict[str, float]) -> StepResult:
        done = self._room == len(self._doors)
        return StepResult(
            observation="" if done else self._observation(),
            reward=sum(paid.values()),
            done=done,
            info={"success": float(done), "rooms": float(self._room)},
            reward_parts={"room": 0.0, "exit": 0.0, "malformed": 0.0} | paid,
        )

    def _observation(self) -> str:
        return f"door {self._doors[self._room]}"

    def _rules(self) -> str:
        verbs = ", ".join(VERBS[: self._world.verbs])
        known = ", ".join(f"{colour} {self._world.verb_of(colour)}" for colour in COLOURS[: self._world.colours])
        return (
            f"You walk through {len(self._doors)} rooms. Each door opens with one verb, given by its colour alone"
            f"{': ' + known if self._world.show_verbs else ''}. "
            f"Answer with <action>VERB</action>, VERB one of: {verbs}."
        )
