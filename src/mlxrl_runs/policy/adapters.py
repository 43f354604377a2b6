"""LoRA adapters: put on, switched off for the reference, checked, saved in mlx-lm's own format."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrl_runs.core.seeding import derive_seed
from mlxrl_runs.errors import ConfigError


@contextmanager
def _hidden_module(name: str) -> Iterator[None]:
    """Inside, importing `name` fails as if it were not installed, unless it is loaded already."""
    hidden = name not in sys.modules
    if hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]


# mlx_lm.tuner loads wandb, when it is there, for callbacks that nothing here uses: 0.6 s before the first step
with _hidden_module("wandb"):
    from mlx_lm.tuner.lora import LoRALinear
    from mlx_lm.tuner.utils import linear_to_lora_layers

ADAPTER_LEAVES = ("lora_a", "lora_b")


def add_lora(
    model: nn.Module, *, rank: int, scale: float, dropout: float, targets: str | Sequence[str], seed: int
) -> dict[str, object]:
    """Freeze `model`, adapt its linear layers in every block, and check that nothing else can learn.

    Args:
        scale: factor of the low-rank product, mlx-lm's meaning (alpha / rank already multiplied).
        targets: "all", or the last names of the layers to adapt ("q_proj").
        seed: of the A matrices; B starts at 0, so a new adapter changes nothing (Hu et al. 2021, arXiv:2106.09685).
    Returns: mlx-lm's adapter config, with every adapted layer named.
    Raises: ConfigError when a target matches no layer.
    """
    model.freeze()
    keys = _adaptable(model, targets)
    parameters = {"rank": rank, "scale": scale, "dropout": dropout, "keys": keys}
    linear_to_lora_layers(model, len(model.layers), parameters)
    _draw_down_projections(model, seed)
    strangers = [
        name for name, _ in tree_flatten(model.trainable_parameters()) if name.rsplit(".", 1)[-1] not in ADAPTER_LEAVES
    ]
    if strangers:
        raise RuntimeError(f"the base is not frozen: {strangers[:3]} would be trained beside the adapter")
    return {"fine_tune_type": "lora", "num_layers": len(model.layers), "lora_parameters": parameters}


def _adaptable(model: nn.Module, targets: str | Sequence[str]) -> list[str]:
    linear = sorted(
        {
            name
            for layer in model.layers
            for name, module in layer.named_modules()
            if isinstance(module, (nn.Linear, nn.QuantizedLinear)) or hasattr(module, "to_lora")
        }
    )
    if targets == "all":
        return linear
    unknown = [target for target in targets if not any(name.split(".")[-1] == target for name in linear)]
    if unknown:
        names = sorted({name.split(".")[-1] for name in linear})
        raise ConfigError(f"adapter.targets: no layer is named {', '.join(unknown)}; this model has {', '.join(names)}")
    return [name for name in linear if name.split(".")[-1] in targets]


def _draw_down_projections(model: nn.Module, seed: int) -> None:
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            bound = 1 / math.sqrt(module.lora_a.shape[0])
            key = mx.random.key(derive_seed(seed, "lora_a", name))
            module.lora_a = mx.random.uniform(-bound, bound, module.lora_a.shape, key=key)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, every adapter's scale is 0: the model is its frozen base."""
    adapted = [module for _, module in model.named_modules() if isinstance(module, LoRALinear)]
    scales = [module.scale for module in adapted]
    for module in adapted:
        module.scale = 0.0
    try:
        yield
    finally:
        for module, scale in zip(adapted, scales, strict=True):
            module.scale = scale


def save_adapter(model: nn.Module, config: dict[str, object], folder: Path) -> None:
    """Write `adapters.safetensors` and `adapter_config.json`; `mlx_lm.load(base, adapter_path=folder)` opens them."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters())))
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
