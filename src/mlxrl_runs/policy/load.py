"""Opens a policy: weights through mlx-lm, tokenizer, adapter, and the reference it is compared with."""

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import Model, ModelArgs
from mlx_lm.utils import load_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mlxrl_runs.core.seeding import derive_seed
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.policy.adapters import adapters_off, add_lora, save_adapter
from mlxrl_runs.policy.shapes import SHAPES

TINY = Path(__file__).resolve().parents[1] / "models" / "tiny"


@dataclass
class Policy:
    """A language model that is being trained.

    Attributes:
        model: mlx-lm's module; in `eval` mode except while a gradient is taken.
        eos_ids: tokens that end an action.
        adapter_config: mlx-lm's adapter config, or None when every weight is trained.
        frozen: a copy of the starting weights, kept only when all weights are trained and a reference is needed.
        folder: where the base was read from; None for weights that were drawn.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    config: dict[str, Any]
    adapter_config: dict[str, object] | None = None
    frozen: nn.Module | None = None
    folder: Path | None = None

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """The starting policy: adapters switched off, or the frozen copy under full training."""
        if self.adapter_config is not None:
            with adapters_off(self.model):
                yield self.model
        elif self.frozen is not None:
            yield self.frozen
        else:
            raise RuntimeError("no reference was kept: full training without keep_reference")

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, from the model's config (nested in multimodal ones)."""
        return int(self.config.get("hidden_size") or self.config.get("text_config", {}).get("hidden_size", 0))

    @property
    def trainable_parameters(self) -> int:
        return sum(array.size for _, array in tree_flatten(self.model.trainable_parameters()))

    def save(self, folder: Path) -> None:
        """What `mlx_lm.load` opens: the adapter alone, or the whole model after full training."""
        if self.adapter_config is not None:
            save_adapter(self.model, self.adapter_config, folder)
            return
        folder.mkdir(parents=True, exist_ok=True)
        weights = dict(tree_flatten(self.model.parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        self.tokenizer.save_pretrained(folder)

    def load_weights(self, folder: Path) -> None:
        """Put saved weights (see `save`) into this policy.

        Raises: ConfigError when the folder holds no weights, or weights of another shape.
        """
        adapted = self.adapter_config is not None
        file = folder / ("adapters.safetensors" if adapted else "model.safetensors")
        if not file.is_file():
            raise ConfigError(f"checkpoint={folder} has no {file.name}. Give a run's adapters/ or checkpoints/step_*")
        if adapted:
            self._check_adapter(folder)
        own = dict(tree_flatten(self.model.trainable_parameters() if adapted else self.model.parameters()))
        try:
            saved = cast(dict[str, mx.array], mx.load(str(file)))
        except RuntimeError as error:
            raise ConfigError(f"checkpoint={folder}: {file.name} is damaged ({error}). Try an earlier one") from error
        if {name: array.shape for name, array in saved.items()} != {name: array.shape for name, array in own.items()}:
            raise ConfigError(
                f"checkpoint={folder} does not fit this model and adapter. See the config.yaml of its run"
            )
        self.model.load_weights(list(saved.items()), strict=False)

    def _check_adapter(self, folder: Path) -> None:
        """The same weights under another scale, or on other layers, would be another policy."""
        file = folder / "adapter_config.json"
        saved = json.loads(file.read_text())["lora_parameters"] if file.is_file() else {}
        own = cast(dict[str, Any], cast(dict[str, Any], self.adapter_config)["lora_parameters"])
        differing = [
            f"adapter.{name} is {own[name]}, the checkpoint's is {saved.get(name)}"
            for name in ("rank", "scale")
            if saved.get(name) != own[name]
        ]
        if saved.get("keys") != own["keys"]:
            differing.append("adapter.targets names other layers than the checkpoint's")
        if differing:
            raise ConfigError(f"checkpoint={folder} does not fit this config: {'; '.join(differing)}")


def open_policy(
    *,
    name: str,
    path: str | None,
    shape: str | None,
    adapter: str,
    seed: int,
    keep_reference: bool,
    rank: int = 8,
    scale: float = 10.0,
    dropout: float = 0.0,
    targets: str | Sequence[str] = "all",
) -> Policy:
    """Load (`tiny`, `local`) or draw (`random`) a model and make it trainable.

    Args:
        adapter: "lora" or "full".
        keep_reference: under full training, keep a frozen copy of the starting weights (adapters need none).
    Raises: ConfigError when the folder or the adapter's targets are wrong.
    """
    policy = (
        _random(shape or "", seed) if name == "random" else _from_folder(TINY if name == "tiny" else Path(path or ""))
    )
    if adapter == "lora":
        policy.adapter_config = add_lora(
            policy.model, rank=rank, scale=scale, dropout=dropout, targets=targets, seed=seed
        )
    else:
        if any(isinstance(module, nn.QuantizedLinear) for _, module in policy.model.named_modules()):
            raise ConfigError("adapter=full cannot train quantised weights; use adapter=lora or a float model")
        policy.model.unfreeze()
        if keep_reference:
            policy.frozen = copy.deepcopy(policy.model)
            policy.frozen.freeze()
            policy.frozen.eval()
    policy.model.eval()
    mx.eval(policy.model.parameters())
    return policy


def _from_folder(folder: Path) -> Policy:
    folder = folder.expanduser()
    try:
        model, config = load_model(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise ConfigError(f"model.path={folder} cannot be opened by mlx-lm: {error}") from error
    return Policy(model, tokenizer, _eos_ids(config, tokenizer), config, folder=folder.resolve())


def _random(shape: str, seed: int) -> Policy:
    config = SHAPES[shape]
    model = Model(ModelArgs.from_dict(config))
    for number, (name, array) in enumerate(tree_flatten(model.parameters())):
        if array.ndim > 1:  # norms keep their ones
            key = mx.random.key(derive_seed(seed, "weights", number))
            scale = array.shape[-1] ** -0.5
            model.load_weights([(name, mx.random.normal(array.shape, scale=scale, key=key))], strict=False)
    tokenizer = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    return Policy(model, tokenizer, frozenset({tokenizer.eos_token_id}), config)


def _eos_ids(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    configured = config.get("eos_token_id")
    ids = set(configured if isinstance(configured, list) else [configured])
    return frozenset((ids | {tokenizer.eos_token_id}) - {None})
