"""Small things many tests build: settings from the yamls, policies, engines, hand-made trajectories."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import yaml
from mlx.utils import tree_flatten

from mlxrl_runs.config import compose_config
from mlxrl_runs.core import registry
from mlxrl_runs.core.batch import Batch, collate
from mlxrl_runs.core.protocols import Scorer
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.core.trajectory import EndReason, Group, StopReason, Trajectory, Turn
from mlxrl_runs.policy.adapters import ADAPTER_LEAVES
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.load import Policy, open_policy
from mlxrl_runs.rollout.engine import Decoding, RolloutEngine
from mlxrl_runs.rollout.episodes import EpisodeRequest, Limits
from mlxrl_runs.rollout.on_policy import requests_of
from mlxrl_runs.training.optimizer import LearningRate, make_optimizer
from mlxrl_runs.training.score import score
from mlxrl_runs.training.update import Updater

CONF = Path(__file__).resolve().parents[1] / "conf"
ALGORITHMS = sorted(file.stem for file in (CONF / "algorithm").glob("*.yaml"))
# A value head that has not learned yet pays nothing for equal returns only where no decay spreads them over an episode.
UNTAUGHT: dict[str, dict[str, Any]] = {"ppo": {"gae_lambda": 1.0, "value_gradient": 0.0}}
ENVIRONMENTS = ["arithmetic", "recurring"]


def settings(group: str, name: str, **changes: Any) -> Any:
    """The class registered under `name`, with its yaml's values and some changed."""
    kinds = {"algorithm": registry.algorithm, "env": registry.environment, "reward": registry.reward}
    file = CONF / group / f"{name}.yaml"
    values = algorithm_values(name) if group == "algorithm" else yaml.safe_load(file.read_text())
    return kinds[group].get(values["name"]).model_validate(values | changes)


@cache
def algorithm_values(name: str) -> dict[str, Any]:
    """An algorithm's keys, those it shares with others among them, as a run of the defaults has them."""
    return compose_config([f"algorithm={name}"])["algorithm"]


def tiny(adapter: str = "lora", seed: int = 0, **changes: Any) -> Policy:
    options: dict[str, Any] = {"source": "tiny", "path": None, "shape": None, "rank": 4, "scale": 4.0}
    return open_policy(adapter=adapter, seed=seed, keep_reference=True, **(options | changes))


def tiny_for(algorithm: Any, **changes: Any) -> Policy:
    """`tiny`, with the value head that the algorithm may want."""
    policy = tiny(**changes)
    if algorithm.needs.values:
        policy.add_value_head()
    return policy


def scored(policy: Policy, batch: Batch, algorithm: Any) -> Batch:
    """The batch with the passes that the algorithm asks for."""
    needs = algorithm.needs
    return score(policy, batch, 1.0, old=needs.old, reference=needs.reference, values=needs.values, rows=0)


def base_hash(model: nn.Module) -> str:
    """Of every weight that is no adapter's."""
    digest = hashlib.sha256()
    for name, array in sorted(tree_flatten(model.parameters())):
        if name.rsplit(".", 1)[-1] not in ADAPTER_LEAVES:
            digest.update(name.encode() + bytes(memoryview(mx.view(array, mx.uint8))))
    return digest.hexdigest()


def engine_of(
    policy: Policy, mode: str = "batched", scorer: Scorer | None = None, decoding: Decoding = Decoding(), **limits: Any
) -> RolloutEngine:
    bounds = Limits(**{"max_completion_tokens": 16} | limits)
    chat, decoding = ChatFormat(policy.tokenizer), replace(decoding, mode=mode)
    return RolloutEngine(policy.model, chat, policy.eos_ids, bounds, decoding, scorer=scorer)


def some_requests(
    environment: str, tasks: int = 3, members: int = 4, seed: int = 0, step: int = 1, **changes: Any
) -> list[EpisodeRequest]:
    family = settings("env", environment, **changes)
    return requests_of(family, family.held_out_tasks()[:tasks], members, seed, ("train", step))


def updater_of(policy: Policy, learning_rate: float = 1e-3, **changes: Any) -> Updater:
    options: dict[str, Any] = {
        "temperature": 1.0, "rows": 0, "checkpoint_every": 0, "max_grad_norm": 1.0, "max_nonfinite": 0, "seed": 0,
        "stop": StopRequest(),
    }  # fmt: skip
    fresh = lambda: make_optimizer("adam", betas=(0.9, 0.95), eps=1e-8)
    rate = LearningRate(learning_rate, "constant", 0, 10, 0.1)
    if policy.value_head is not None:
        options |= {"value_optimizer": fresh(), "value_learning_rate": rate}
    return Updater(policy, fresh(), rate, **(options | changes))


def turn(
    action: Sequence[int], reward: float = 0.0, state: str = "s", context: Sequence[int] = (5, 6), **changes: Any
) -> Turn:
    return Turn(
        context=tuple(context),
        observation=(0, len(context)),
        action=tuple(action),
        sampler_logp=changes.pop("sampler_logp", (-1.0,) * len(action)),
        reward=reward,
        reward_parts={},
        state=state,
        stop=StopReason.EOS,
        text="x",
        **changes,
    )


def trajectory(*turns: Turn, task: str = "t", member: int = 0, **info: float) -> Trajectory:
    return Trajectory(task, member, turns, EndReason.ENV_DONE, info=info)


def one_turn_batch(returns_by_task: Sequence[Sequence[float]], lengths: Sequence[int] | None = None) -> Batch:
    """One-turn episodes; member i of each task writes lengths[i] tokens."""
    groups = []
    for number, returns in enumerate(returns_by_task):
        members = [
            trajectory(turn(range(10, 10 + (lengths[i] if lengths else 2)), reward), task=f"t{number}", member=i)
            for i, reward in enumerate(returns)
        ]
        groups.append(Group(f"t{number}", tuple(members)))
    return collate(groups)
