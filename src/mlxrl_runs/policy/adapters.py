"""LoRA and DoRA adapters: put on, switched off for the reference, checked, saved in mlx-lm's own format."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

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
    from mlx_lm.tuner.dora import DoRALinear
    from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
    from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
LINEAR = (nn.Linear, nn.QuantizedLinear, *EXPERTS)
ADAPTED = (LoRALinear, LoRASwitchLinear, DoRALinear)
ADAPTER_LEAVES = ("lora_a", "lora_b", "m")  # m: DoRA's magnitudes
ROUTERS = ("gate", "router", "shared_expert_gate")  # when they stand beside experts


def add_adapter(
    model: nn.Module, kind: str, *, rank: int, scale: float, dropout: float, targets: str | Sequence[str], seed: int
) -> dict[str, object]:
    """Freeze `model`, adapt linear layers in every block, and check that nothing else can learn.

    Args:
        kind: "lora" (Hu et al. 2021, arXiv:2106.09685) or "dora" (Liu et al. 2024, arXiv:2402.09353).
        scale: factor of the low-rank product, mlx-lm's meaning (alpha / rank already multiplied).
        targets: "auto" (all but the routers of mixtures of experts), "all", or the last names of layers ("q_proj").
            DoRA leaves experts out: mlx-lm has none for them.
        seed: of the A matrices; B starts at 0, so a new adapter changes nothing.
    Returns: mlx-lm's adapter config, with every adapted layer named.
    Raises: ConfigError when a target matches no layer, or the layers cannot be adapted.
    """
    model.freeze()
    keys = _chosen(model, kind, targets)
    odd = {module.bits for _, module in model.named_modules() if isinstance(module, nn.QuantizedLinear)} - {2, 4, 8}
    if kind == "dora" and odd:  # mlx-lm counts a layer's inputs as a whole number to each 32 bits
        raise ConfigError(
            f"adapter: got dora, which mlx-lm cannot put on weights of {odd.pop()} bits. Try adapter=lora, or "
            "model.precision=4bit."
        )
    parameters = {"rank": rank, "scale": scale, "dropout": dropout, "keys": keys}
    try:
        linear_to_lora_layers(model, len(model.layers), parameters, use_dora=kind == "dora")
    except ValueError as error:
        raise ConfigError(f"adapter: got {kind}, which mlx-lm cannot put on this model ({error})") from error
    _draw_down_projections(model, seed)
    learning = [name for name, _ in tree_flatten(model.trainable_parameters())]
    strangers = [name for name in learning if name.rsplit(".", 1)[-1] not in ADAPTER_LEAVES]
    if strangers:
        raise RuntimeError(f"the base is not frozen: {strangers[:3]} would be trained beside the adapter")
    return {"fine_tune_type": kind, "num_layers": len(model.layers), "lora_parameters": parameters}


def _chosen(model: nn.Module, kind: str, targets: str | Sequence[str]) -> list[str]:
    """Names inside a block of the layers to adapt."""
    blocks = [dict(layer.named_modules()) for layer in model.layers]
    linear = {name: module for block in blocks for name, module in block.items() if isinstance(module, LINEAR)}
    if kind == "dora":
        linear = {name: module for name, module in linear.items() if not isinstance(module, EXPERTS)}
    if targets == "all":
        return sorted(linear)
    if targets == "auto":
        return sorted(linear.keys() - {router for block in blocks for router in _routers(block)})
    last = {name: name.split(".")[-1] for name in linear}
    unknown = [target for target in targets if target not in last.values()]
    if unknown:
        allowed = ", ".join(sorted(set(last.values())))
        raise ConfigError(
            f"adapter.targets: no layer is named {', '.join(unknown)}; this model has {allowed}. "
            "Try adapter.targets=auto."
        )
    return sorted(name for name in linear if last[name] in targets)


def _routers(block: dict[str, nn.Module]) -> list[str]:
    """Layers that choose experts: a step on them moves whole tokens from one expert to another."""
    experts = [name for name, module in block.items() if isinstance(module, EXPERTS)]
    return [
        name
        for name in block
        if name.split(".")[-1] in ROUTERS
        and any(expert.startswith(name.removesuffix(name.split(".")[-1])) for expert in experts)
    ]


def _draw_down_projections(model: nn.Module, seed: int) -> None:
    for name, module in _adapted(model):
        inputs = module.lora_a.shape[-1 if isinstance(module, LoRASwitchLinear) else 0]
        bound = 1 / math.sqrt(inputs)
        key = mx.random.key(derive_seed(seed, "lora_a", name))
        module.lora_a = mx.random.uniform(-bound, bound, module.lora_a.shape, key=key)


def _adapted(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, ADAPTED)]


def is_fresh(model: nn.Module) -> bool:
    """True when every adapter of the model still changes nothing at all."""
    adapted = [module for _, module in _adapted(model)]
    if any(isinstance(module, DoRALinear) for module in adapted):
        return False  # its magnitudes may have moved alone
    return not mx.any(mx.stack([mx.any(module.lora_b != 0) for module in adapted])).item()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, every adapted layer is replaced by the frozen layer it wraps: the model is its base, bit for bit."""
    with _replaced(model, lambda module: module.linear):
        yield


@contextmanager
def adapters_merged(model: nn.Module) -> Iterator[None]:
    """Inside, every adapted layer is one plain layer whose weights are base + adapter, rounded to the base's format.

    Quantised weights become numbers of the activations' format, which are not quantised anew.
    """
    with _replaced(model, lambda module: module.fuse(dequantize=True)):
        yield


@contextmanager
def _replaced(model: nn.Module, stand_in: Callable[[nn.Module], nn.Module]) -> Iterator[None]:
    adapted = _adapted(model)
    model.update_modules(tree_unflatten([(name, stand_in(module)) for name, module in adapted]))
    try:
        yield
    finally:
        model.update_modules(tree_unflatten(adapted))


@contextmanager
def put_on_by_mlx_lm(model: nn.Module, folder: Path) -> Iterator[None]:
    """Inside, the model is its base with the adapter saved in `folder`, as `mlx_lm.load` puts it on."""
    with adapters_off(model):
        load_adapters(model, str(folder))
        model.eval()
        yield


def merged_bytes(model: nn.Module) -> int:
    """What the weights of `adapters_merged` take beside those of the model; 0 without an adapter."""
    return sum(_float_bytes(module.linear) for _, module in _adapted(model))


def _float_bytes(layer: nn.Module) -> int:
    if "scales" not in layer:
        return int(layer.weight.nbytes)
    return int(layer.weight.size * 32 // layer.bits * layer.scales.dtype.size)


@contextmanager
def swapped_in(model: nn.Module, weights: Mapping[str, mx.array]) -> Iterator[None]:
    """Inside, these take the place of the model's trainable weights of the same names."""
    live = tree_flatten(model.trainable_parameters())
    model.load_weights(list(weights.items()), strict=False)
    try:
        yield
    finally:
        model.load_weights(live, strict=False)


def save_adapter(model: nn.Module, config: Mapping[str, object], folder: Path) -> None:
    """Write `adapters.safetensors` and `adapter_config.json`; `mlx_lm.load(base, adapter_path=folder)` opens them."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters())))
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def misfits(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Why the weights of a saved adapter would mean something else in this one.

    Args: saved, own: adapter configs in mlx-lm's format; one written by mlx-lm itself may leave `keys` out.
    """
    kind = saved.get("fine_tune_type", "lora")
    if kind != own["fine_tune_type"]:
        return [f"adapter is {own['fine_tune_type']}, the saved one is {kind}"]
    theirs, mine = saved.get("lora_parameters", {}), own["lora_parameters"]
    found = [
        f"adapter.{name} is {mine[name]}, the saved one's is {theirs.get(name)}"
        for name in ("rank", "scale")
        if theirs.get(name) != mine[name]
    ]
    if sorted(theirs.get("keys") or mine["keys"]) != sorted(mine["keys"]):
        found.append(f"adapter.targets names other layers than the saved one: {', '.join(sorted(theirs['keys']))}")
    return found
