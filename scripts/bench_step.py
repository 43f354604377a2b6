"""A whole GRPO step, rollout and update, ours beside other trainers on MLX: time for each sampled token.

    python scripts/bench_step.py [--tasks 8] [--group-size 4] [--tokens 16] [--json FILE]
    python scripts/bench_step.py --model random --shape qwen3_0_6b --precision 4bit --tasks 1 --tokens 256

The same starting weights, adapter, prompts, group size, length limit and draws at temperature 1 for all, and everything
else as each comes: ours measures KL(policy || reference) each step, the others have it in their loss. With model=tiny
the prompts are sums and answers end by themselves; with random weights prompts are digits and nothing ends a row but
its length. Every turn of a system is `--steps` steps. Logging, evaluation and checkpoints are left out; mlx-lm-lora
saves its adapter once a turn. For columns and peers see bench_rollout.py.
"""

import argparse
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlxrl_runs import backend

BACKEND = backend.prepare()

from mlx_lm.tokenizer_utils import TokenizerWrapper

import bench_rollout
from benching import Done, System, chosen, engine_of, opened, surroundings, table, take_turns, with_ratios
from mlxrl_runs.config import RunConfig, compose_config, validate
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.protocols import StepResult
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.load import Policy
from mlxrl_runs.rollout.episodes import EpisodeRequest, Limits
from mlxrl_runs.rollout.on_policy import group_up
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.training.optimizer import LearningRate, make_optimizer
from mlxrl_runs.training.score import score
from mlxrl_runs.training.update import Updater
from peers.tokens import WithoutEnd

REPEATS, STEPS, PATIENCE_SECONDS = 5, 4, 60.0
LEARNING_RATE = 1e-5  # the others' default: so small that lengths stay comparable
COLUMNS = ("milliseconds_per_token", "tokens_per_second", "ours_to_it", "seconds", "peak_bytes", "host_share", "spread")


@dataclass(frozen=True)
class Task:
    """One prompt and how its answers are paid."""

    name: str
    text: str
    reward: Callable[[str], float]


class Question:
    """A task as an environment of one turn."""

    max_turns = 1

    def __init__(self, task: Task):
        self._task = task

    def reset(self) -> str:
        return self._task.text

    def step(self, action: str) -> StepResult:
        return StepResult("", self._task.reward(action), True)

    def state_id(self, observation: str) -> str:
        return self._task.name


@dataclass(frozen=True)
class Work:
    """What every system does in a step.

    Attributes:
        open: a fresh policy, the same for each system.
        ends: whether an end mark ends a row.
    """

    open: Callable[[], Policy]
    tasks: tuple[Task, ...]
    group_size: int
    tokens: int
    ends: bool
    steps: int

    @property
    def texts(self) -> list[str]:
        return [task.text for task in self.tasks]

    def reward(self, text: str, completion: str) -> float:
        return next(task for task in self.tasks if task.text == text).reward(completion)

    def tokenizer(self, policy: Policy) -> Any:
        """As the others want it: wrapped by mlx-lm, or with nothing that ends a row."""
        own = policy.tokenizer
        return TokenizerWrapper(own, eos_token_ids=policy.eos_ids) if self.ends else WithoutEnd(own)


def sums(config: RunConfig, count: int) -> tuple[Task, ...]:
    """Problems of the arithmetic environment, paid as it pays."""
    make = config.env.make
    paid = lambda task, action: make(task, 0, 0).step(action).reward
    return tuple(
        Task(task, make(task, 0, 0).reset(), partial(paid, task)) for task in config.env.held_out_tasks()[:count]
    )


def digits(policy: Policy, count: int, prompt_tokens: int) -> tuple[Task, ...]:
    """Random digits, paid by a coin that the completion itself decides: half of a group is better than its mean."""
    work = bench_rollout.work_of(policy, prompt_tokens, [1] * count * bench_rollout.GROUP_SIZE)
    coin = lambda action: float(zlib.crc32(action.encode()) % 2)
    return tuple(Task(f"digits {number}", text, coin) for number, text in enumerate(work.texts))


# ---- systems


class OurTrainer:
    """The steps of a run, without its folder, its log and its evaluations."""

    def __init__(self, work: Work, config: RunConfig, options: dict[str, Any]):
        self._work, self._config, self._policy = work, config, work.open()
        limits = Limits(work.tokens, ignore_eos=not work.ends)
        self._engine = engine_of(self._policy, limits, **options)
        optimizer = config.optimizer
        self._updater = Updater(
            self._policy, make_optimizer(optimizer.name, betas=optimizer.betas, eps=optimizer.eps, weight_decay=0.0),
            LearningRate(LEARNING_RATE, "constant", 0, 1, 1.0), temperature=config.rollout.temperature,
            rows=config.memory.micro_batch_size, checkpoint_every=config.memory.checkpoint_every,
            max_grad_norm=optimizer.max_grad_norm,
            max_nonfinite=config.trainer.max_nonfinite_updates, seed=0, stop=StopRequest(),
        )  # fmt: skip
        self._steps = 0

    def step(self) -> int:
        """Take one step; how many tokens were sampled."""
        self._steps += 1
        tasks, members, config = self._work.tasks, range(self._work.group_size), self._config
        requests = [
            EpisodeRequest(task.name, member, partial(Question, task), ("step", self._steps, task.name, member))
            for task in tasks
            for member in members
        ]
        trajectories, cost = self._engine.play(requests, Sampling())
        batch = collate(group_up([task.name for task in tasks], trajectories, len(members)))
        batch = score(
            self._policy, batch, config.rollout.temperature, old=config.algorithm.needs.old,
            reference=config.tracking.kl_every > 0, rows=config.memory.micro_batch_size,
        )  # fmt: skip
        self._updater.update(config.algorithm, config.algorithm.credit(batch))
        return cost.sampled_tokens


def ours_system(work: Work, config: RunConfig, options: dict[str, Any]) -> System:
    def prepare() -> Callable[[], Done]:
        trainer = OurTrainer(work, config, options)
        return lambda: Done(sum(trainer.step() for _ in range(work.steps)))

    return System("ours", prepare)


def inductive_system(name: str, way: str, work: Work) -> System:
    def prepare() -> Callable[[], Done]:
        from peers import inductive

        policy = work.open()
        trainer = inductive.Trainer(way, policy.model, work.tokenizer(policy), work.reward)
        step = lambda: trainer.step(work.texts, work.group_size, work.tokens)
        return lambda: Done(sum(step() for _ in range(work.steps)))

    return System(name, prepare)


def lora_trainer_system(work: Work) -> System:
    def prepare() -> Callable[[], Done]:
        from peers import lora_trainers

        policy, reference = work.open(), work.open()
        trainer = lora_trainers.Trainer(
            policy.model, reference.model.freeze(), work.tokenizer(policy), work.reward
        )  # fmt: skip
        chat = ChatFormat(policy.tokenizer)
        prompts = [chat.first(text).tokens for text in work.texts]
        return lambda: Done(trainer.steps(work.steps, work.texts, prompts, work.group_size, work.tokens))

    return System("mlx-lm-lora", prepare)


# ---- the whole


def systems(work: Work, config: RunConfig, options: dict[str, Any]) -> list[System]:
    return [
        ours_system(work, config, options),
        inductive_system("inductive-mlxrl", "one by one", work),
        inductive_system("inductive-mlxrl, batched + compiled rollout", "batched + compiled", work),
        lora_trainer_system(work),
    ]


def main() -> None:
    given = parsed()
    open_one = partial(opened, given.model, given.shape, given.precision, given.adapter)
    policy, config = open_one(), validate(compose_config(["env=arithmetic", "algorithm=grpo"]))
    if policy.hidden_size < backend.SHARED_BLAS_FROM:
        backend.use_blas_threads(BACKEND, 1)
    ends = given.model == "tiny"
    tasks = sums(config, given.tasks) if ends else digits(policy, given.tasks, given.prompt_tokens)
    del policy  # each system opens its own
    work = Work(open_one, tasks, given.group_size, given.tokens, ends, given.steps)
    options = {"merge_adapter": given.merge_adapter, "compile_when": given.compile}
    measured = systems(work, config, {name: value for name, value in options.items() if value is not None})
    measured = chosen(measured, given.systems)
    take_turns(measured, given.repeats, given.patience)
    results = with_ratios([system.result() for system in measured], {}, "ours")
    report = surroundings(BACKEND) | {"arguments": vars(given) | {"json": None}, "systems": results}
    print(shown(report))
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


def shown(report: dict[str, Any]) -> str:
    given = report["arguments"]
    head = f"## whole step: {given['model']}, tasks {given['tasks']}, group size {given['group_size']}, "
    head += f"at most {given['tokens']} tokens, {given['steps']} steps a turn, {report['backend']}"
    return f"{head}\n\n{table(report['systems'], COLUMNS)}\n"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tasks", type=int, default=8, help="prompts of a step")
    add("--group-size", type=int, default=4)
    add("--tokens", type=int, default=16, help="that a row writes, at most")
    add("--prompt-tokens", type=int, default=97, help="for --model random")
    add("--steps", type=int, default=STEPS, help="of one turn")
    add("--model", choices=["tiny", "random"], default="tiny")
    add("--shape", default="11m", help="for --model random")
    add("--precision", choices=["float32", "bfloat16", "4bit"], default="float32")
    add("--adapter", choices=["lora"], default="lora")
    add("--merge-adapter", choices=["auto", "always", "never"], help="of our engine; its own default if left out")
    add("--compile", choices=["auto", "always", "never"], help="of our engine; its own default if left out")
    add("--systems", type=lambda text: text.split(";"), default=(), help="their names as the table has them, with ;")
    add("--repeats", type=int, default=REPEATS)
    add("--patience", type=float, default=PATIENCE_SECONDS, help="a system that took so many seconds is not repeated")
    add("--json", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
