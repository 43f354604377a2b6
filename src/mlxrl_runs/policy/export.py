"""A trained policy in mlx-lm's own formats, and the proof that what was written is the policy that was trained."""

import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import dequantize_model
from mlx_lm.utils import save as save_model

from mlxrl_runs.errors import ConfigError
from mlxrl_runs.maths.scalars import number
from mlxrl_runs.policy.load import TINY, Policy

PROBE = "door red: 12 + 30 = 42. What opens it, and why? Answer in one line.\n"
ADAPTER_FILES = ("adapters.safetensors", "adapter_config.json")
NOT_OF_THE_MODEL = ("optimizer.safetensors", "state.json", "manifest.json")  # what a checkpoint holds beside weights


@dataclass(frozen=True)
class Answer:
    """What a model makes of the probe.

    Attributes: tokens: ids of the probe; logits: (T, V) float32.
    """

    tokens: tuple[int, ...]
    logits: mx.array

    @property
    def largest(self) -> float:
        """The largest absolute logit, which rounding errors grow with."""
        return number(mx.abs(self.logits).max())

    def difference(self, other: "Answer") -> float:
        """The largest absolute difference of a logit; infinite where the tokenizers disagree about the probe."""
        if self.tokens != other.tokens or self.logits.shape != other.logits.shape:
            return float("inf")
        return number(mx.abs(self.logits - other.logits).max())


def answer(model: nn.Module, tokenizer: Any) -> Answer:
    """The probe, read by a model in evaluation mode."""
    tokens = tokenizer.encode(PROBE, add_special_tokens=False)
    logits = model(mx.array(tokens)[None])[0].astype(mx.float32)
    mx.eval(logits)
    return Answer(tuple(tokens), logits)


def reopened(model: Path, adapter: Path | None) -> Answer:
    """What mlx-lm alone makes of what was written."""
    opened, tokenizer, *_ = mlx_lm.load(str(model), adapter_path=None if adapter is None else str(adapter))
    opened.eval()
    return answer(opened, tokenizer)


def is_float32(policy: Policy) -> bool:
    """Whether every weight is a float32 number, so that fusing only rounds in the last place."""
    return all(array.dtype == mx.float32 for _, array in tree_flatten(policy.model.parameters()))


def copy_adapter(weights: Path, base: Path, folder: Path) -> None:
    """The saved adapter, with the folder of the base it belongs to named in its config."""
    for name in ADAPTER_FILES:
        shutil.copy(weights / name, folder / name)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model"] = {**config.get("base_model", {}), "folder": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def copy_model(policy: Policy, weights: Path, folder: Path) -> None:
    """The whole model that a run saved, without what only a resumed run reads."""
    shutil.copytree(weights, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*NOT_OF_THE_MODEL))
    generation = None if policy.origin.folder is None else policy.origin.folder / "generation_config.json"
    if generation is not None and generation.is_file() and not (folder / generation.name).exists():
        shutil.copy(generation, folder)


def write_fused(policy: Policy, folder: Path, *, dequantize: bool) -> None:
    """Merge the adapter into the base, in place, and write the whole model as mlx-lm's own fuse does.

    Args: dequantize: a quantised base becomes a float one; otherwise adapted layers are quantised again, which rounds.
    """
    layers = [
        (name, module.fuse(dequantize=dequantize))
        for name, module in policy.model.named_modules()
        if hasattr(module, "fuse")
    ]
    policy.model.update_modules(tree_unflatten(layers))
    config = dict(policy.config)
    if dequantize:
        dequantize_model(policy.model)
        config = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    save_model(folder, policy.origin.folder or TINY, policy.model, policy.tokenizer, config, donate_model=False)
    (folder / "README.md").unlink(missing_ok=True)  # mlx-lm's model card says nothing about this model


def base_folder(policy: Policy) -> Path:
    """Where mlx-lm finds the base of an adapter.

    Raises: ConfigError for weights that lie in no folder, or in another precision there.
    """
    if policy.origin.folder is None:
        raise ConfigError(
            "model=random: its weights lie in no folder, so mlx-lm cannot put an adapter on them. Try --fuse."
        )
    if not policy.is_as_stored:
        raise ConfigError(
            "model.precision: the adapter was trained on weights in another precision than those in "
            f"{policy.origin.folder}, on which mlx-lm would put it. Try --fuse."
        )
    return policy.origin.folder


def talk_commands(model: str, adapter: str | None, prompt: str) -> Sequence[str]:
    """What to type to talk to a model: a conversation, and one answer."""
    opened = ["--model", model, *(["--adapter-path", adapter] if adapter else [])]
    return [
        shlex.join(["python", "-m", "mlx_lm", "chat", *opened]),
        shlex.join(["python", "-m", "mlx_lm", "generate", *opened, "--prompt", prompt]),
    ]
