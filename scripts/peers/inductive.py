"""inductive-mlxrl 0.2.4 (imported as mlxrl): group rollouts and agentic rollouts.

Its commands sample a group row by row. A batched decode, and one compiled, are in its library; both start again row by
row when a row ends early. Its agentic rollout feeds prompts token by token and ends an action only at its length.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.nn as nn
import mlx.optimizers as optim
from mlxrl.algo import GRPOAlgorithm
from mlxrl.config import TrainConfig
from mlxrl.env import StepResult
from mlxrl.policy.logprobs import pad_token_id_from_tokenizer
from mlxrl.rollout import SamplingConfig, generate_agentic_trajectories, generate_group_rollouts
from mlxrl.rollout.naive import generate_completion
from mlxrl.rollout.optimized import generate_prefix_cached_group_rollouts
from mlxrl.train import batch_from_rollouts, optimizer_step

from peers.tokens import WithoutEnd

Rows = tuple[tuple[int, ...], ...]
WAYS: dict[str, Callable[..., Any]] = {
    "one by one": generate_group_rollouts,
    "batched": partial(generate_prefix_cached_group_rollouts, batch_groups=True),
    "batched + compiled": partial(generate_prefix_cached_group_rollouts, batch_groups=True, compile_decode_step=True),
}


def sampling(max_tokens: int) -> SamplingConfig:
    """Plain draws at temperature 1."""
    return SamplingConfig(max_tokens=max_tokens, temperature=1.0, top_p=1.0)


def groups(
    way: str, model: nn.Module, tokenizer: Any, texts: Sequence[str], prompts: Rows, group_size: int, max_tokens: int
) -> Rows:
    """`group_size` rows for each text, all of `max_tokens` tokens.

    Raises: ValueError when it reads other prompts than the other systems.
    """
    found = WAYS[way](
        model=model, tokenizer=WithoutEnd(tokenizer), prompts=texts, group_size=group_size,
        config=sampling(max_tokens), seed=0,
    )  # fmt: skip
    if {row.prompt_tokens for row in found} != set(prompts):
        raise ValueError("it reads other prompts than the other systems")
    return tuple(row.completion_tokens for row in found)


def rows_of_lengths(model: nn.Module, tokenizer: Any, prompts: Rows, lengths: Sequence[int]) -> Rows:
    """Each row to its own length, row by row, as its group rollouts go once a row ends early."""
    endless = WithoutEnd(tokenizer)
    return tuple(
        generate_completion(model, endless, prompt, sampling(length), frozenset())[0]
        for prompt, length in zip(prompts, lengths, strict=True)
    )


class World:
    """One of our environments in its protocol. Its default parser hands over what stands within the action tags."""

    def __init__(self, environment: Any):
        self._environment = environment
        self.max_turns = environment.max_turns

    def reset(self) -> str:
        return self._environment.reset()

    def step(self, action: str) -> StepResult:
        result = self._environment.step(f"<action>{action}</action>")
        return StepResult(result.observation, result.reward, result.done, result.info)

    def state_id(self, observation: str) -> str:
        return self._environment.state_id(observation)


def episodes(
    model: nn.Module,
    tokenizer: Any,
    make: Callable[[str, int, int], Any],
    tasks: Sequence[str],
    group_size: int,
    max_tokens: int,
) -> Rows:
    """`group_size` episodes of each task; what each wrote, turn after turn.

    Args: make: (task, seed, member) -> one of our environments.
    """
    found = generate_agentic_trajectories(
        model=model, tokenizer=tokenizer, env_factory=lambda *which: World(make(*which)), tasks=tasks,
        group_size=group_size, sampling=sampling(max_tokens), seed=0,
    )  # fmt: skip
    return tuple(row.action_token_ids() for row in found)


class Trainer:
    """Whole GRPO steps as its `train` command takes them, on several prompts a step instead of one.

    Args:
        way: one of WAYS; the command's own is "one by one".
        tokenizer: names the end marks.
        reward: (prompt's text, completion's text) -> a number.
    """

    def __init__(self, way: str, model: nn.Module, tokenizer: Any, reward: Callable[[str, str], float]):
        self._way, self._model, self._tokenizer, self._reward = WAYS[way], model, tokenizer, reward
        self._defaults = TrainConfig()
        self._optimizer = optim.Adam(learning_rate=self._defaults.optimizer.learning_rate)
        self._steps = 0

    def step(self, texts: Sequence[str], group_size: int, max_tokens: int) -> int:
        """Take one step; its optimizer's rate, KL weight and reference pass are its defaults.

        Returns: how many tokens were sampled.
        """
        self._steps += 1
        rows = self._way(
            model=self._model, tokenizer=self._tokenizer, prompts=texts, group_size=group_size,
            config=sampling(max_tokens), seed=self._steps,
        )  # fmt: skip
        algorithm, beta = GRPOAlgorithm(), self._defaults.kl_beta
        pad = pad_token_id_from_tokenizer(self._tokenizer)
        batch = batch_from_rollouts(
            model=self._model, completions=rows, rewards=[self._reward(texts[r.prompt_index], r.text) for r in rows],
            group_size=group_size, pad_token_id=pad, algorithm=algorithm, compute_reference=beta != 0.0,
        )  # fmt: skip
        optimizer_step(
            model=self._model, optimizer=self._optimizer, batch=batch, beta=beta, pad_token_id=pad, algorithm=algorithm
        )
        return sum(len(row.completion_tokens) for row in rows)
