"""In which numbers a model's weights are kept."""

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import dequantize_model, quantize_model

from mlxrl_runs.errors import ConfigError

GROUP_SIZE = 64  # mlx-lm's own choice for 4 bits
FLOATS = {"float32": mx.float32, "bfloat16": mx.bfloat16}
QUANTISED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)


def is_quantised(model: nn.Module) -> bool:
    return any(isinstance(module, QUANTISED) for _, module in model.named_modules())


def with_precision(model: nn.Module, config: dict[str, Any], precision: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model in another precision, and the config.json that fits it.

    Args: precision: "stored" leaves it as its files have it; "float32", "bfloat16" or "4bit".
    Raises: ConfigError when a layer cannot be cut into groups for 4 bits.
    """
    if precision == "stored":
        return model, config
    if precision == "4bit":
        return _in_4_bits(model, config)
    # the scales of a quantised base are cast first: it is taken apart in the precision asked for
    model.set_dtype(FLOATS[precision])
    model = dequantize_model(model)
    return model, _without_quantization(config)


def _in_4_bits(model: nn.Module, config: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    # an embedding may keep more bits, as SmolLM2's does
    linear = (nn.QuantizedLinear, QuantizedSwitchLinear)
    bits = {module.bits for _, module in model.named_modules() if isinstance(module, linear)}
    if bits == {4}:
        return model, config
    model, config = dequantize_model(model), _without_quantization(config)
    wrong = [
        f"{name} has {module.weight.shape[-1]}"
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, SwitchLinear)) and module.weight.shape[-1] % GROUP_SIZE
    ]
    if wrong:
        raise ConfigError(
            f"model.precision: 4bit needs layers whose inputs are a multiple of {GROUP_SIZE}; {wrong[0]}. "
            "Try model.precision=stored."
        )
    with redirect_stdout(StringIO()):  # it prints its bits per weight
        return quantize_model(model, config, group_size=GROUP_SIZE, bits=4)


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
