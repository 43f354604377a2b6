"""One decode step of a dense decoder (llama, qwen2, qwen3) in fewer, larger pieces than mlx-lm's own classes take.

The three projections of a layer that read the same numbers become one; rope and the norms of queries and keys are
applied to both at once; nothing is transposed, since one token a row needs no turning. Equal to mlx-lm's classes up to
rounding. It reads an mlx-lm model's weights as they are at the moment, and is arrays in, arrays out, to be compiled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.tuner.lora import LoRALinear

from mlxrl_runs.maths import exponential
from mlxrl_runs.rollout.layers import Arrays

DENSE = (llama.Model, qwen2.Model, qwen3.Model)
MASKED = -1e30
Weights = dict[str, Any]


class Projection:
    """Linear layers that read the same input, as one product. Their weights are arguments, this is their form.

    Args: modules: nn.Linear or nn.QuantizedLinear of one kind, each of them adapted by LoRA or not.
    """

    def __init__(self, modules: Sequence[nn.Module]):
        self._modules = modules
        bases = [_base(module) for module in modules]
        self._quantised = (
            {name: getattr(bases[0], name) for name in ("group_size", "bits", "mode")}
            if isinstance(bases[0], nn.QuantizedLinear)
            else None
        )

    @staticmethod
    def supports(modules: Sequence[nn.Module]) -> bool:
        kinds = all(type(_base(module)) in (nn.Linear, nn.QuantizedLinear) for module in modules)
        return kinds and len({_form(module) for module in modules}) == 1

    def weights(self) -> Weights:
        """What the modules hold at the moment, put together.

        Adapters come in the number format of the activations, which quantised weights tell by their scales; those of
        mxfp4 and its like are integers, and adapters stay as they are then.
        """
        bases = [_base(module) for module in self._modules]
        names = [name for name in ("weight", "scales", "biases", "bias") if name in bases[0]]
        joined = {name: _joined([base[name] for base in bases]) for name in names}
        number_format = joined["scales" if self._quantised else "weight"].dtype
        if not self._quantised:
            joined["weight"] = joined["weight"].T  # a view, turned here once and not in every step
        adapted = [module for module in self._modules if isinstance(module, LoRALinear)]
        if adapted:
            if not mx.issubdtype(number_format, mx.floating):
                number_format = adapted[0].lora_a.dtype
            joined["lora_a"] = mx.concatenate([module.lora_a for module in adapted], axis=1).astype(number_format)
            joined["lora_b"] = _diagonal(self._modules).astype(number_format)
        return joined

    def __call__(self, x: mx.array, weights: Weights, onto: mx.array | None = None) -> mx.array:
        """(B, inputs) -> (B, outputs), added to `onto` if that is given."""
        parts = [part for part in (onto, weights.get("bias")) if part is not None]
        if self._quantised:
            y = mx.quantized_matmul(
                x, weights["weight"], weights["scales"], weights.get("biases"), transpose=True, **self._quantised
            )
        else:
            y = mx.addmm(parts.pop(), x, weights["weight"]) if parts else x @ weights["weight"]
        for part in parts:
            y = y + part
        return mx.addmm(y, x @ weights["lora_a"], weights["lora_b"]).astype(x.dtype) if "lora_a" in weights else y


def _form(module: nn.Module) -> tuple[object, ...]:
    """What a product with this layer's weights depends on beside them."""
    base = _base(module)
    return type(base), "bias" in base, *(getattr(base, name, None) for name in ("bits", "group_size", "mode"))


def _base(module: nn.Module) -> nn.Module:
    return module.linear if isinstance(module, LoRALinear) else module


def _joined(arrays: list[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


def _diagonal(modules: Sequence[nn.Module]) -> mx.array:
    """(ranks of all, outputs of all): each adapter's B, scaled, where its own A and its own outputs meet."""
    outputs = [_base(module).weight.shape[0] for module in modules]
    rows, before = [], 0
    for module, width in zip(modules, outputs, strict=True):
        if isinstance(module, LoRALinear):
            rows.append(mx.pad(module.scale * module.lora_b, [(0, 0), (before, sum(outputs) - before - width)]))
        before += width
    return mx.concatenate(rows)


class Layer:
    """One decoder layer, cut where attention looks at the keys and values of the other tokens."""

    def __init__(self, block: nn.Module, joins_mlp: bool):
        self.attention, self._block = block.self_attn, block
        attention, mlp = block.self_attn, block.mlp
        self.heads, self.kv_heads = attention.n_heads, attention.n_kv_heads
        self._has_norms = "q_norm" in attention
        inner = [[mlp.gate_proj, mlp.up_proj]] if joins_mlp else [[mlp.gate_proj], [mlp.up_proj]]
        self._forms = {
            "qkv": Projection([attention.q_proj, attention.k_proj, attention.v_proj]),
            "out": Projection([attention.o_proj]),
            **{f"inner{number}": Projection(modules) for number, modules in enumerate(inner)},
            "down": Projection([mlp.down_proj]),
        }
        self._inner = [name for name in self._forms if name.startswith("inner")]

    @staticmethod
    def supports(block: nn.Module) -> bool:
        joined = all(Projection.supports(group) for group in _joined_in(block))
        return joined and not getattr(block, "use_sliding", False)

    def weights(self) -> Weights:
        weights: Weights = {name: form.weights() for name, form in self._forms.items()}
        weights["before"] = self._block.input_layernorm.weight
        weights["between"] = self._block.post_attention_layernorm.weight
        if self._has_norms:
            query, key = self.attention.q_norm.weight, self.attention.k_norm.weight
            weights["norms"] = mx.concatenate(
                [
                    mx.broadcast_to(query, (self.heads, 1, query.size)),
                    mx.broadcast_to(key, (self.kv_heads, 1, key.size)),
                ]
            )
        return weights

    def queries_keys_values(
        self, x: mx.array, weights: Weights, offset: mx.array | int
    ) -> tuple[mx.array, mx.array, mx.array]:
        """(B, hidden) -> (B, heads, 1, D), (B, kv heads, 1, D) twice, rope applied at each row's `offset`."""
        attention = self.attention
        normed = mx.fast.rms_norm(x, weights["before"], self._block.input_layernorm.eps)
        together = self._forms["qkv"](normed, weights["qkv"])
        every = self.heads + 2 * self.kv_heads
        together = together.reshape(x.shape[0], every, 1, -1)
        turned, values = together[:, : self.heads + self.kv_heads], together[:, self.heads + self.kv_heads :]
        if self._has_norms:
            turned = mx.fast.rms_norm(turned, None, attention.q_norm.eps) * weights["norms"]
        turned = attention.rope(turned, offset=offset)
        return turned[:, : self.heads], turned[:, self.heads :], values

    def rest(self, x: mx.array, attended: mx.array, weights: Weights) -> mx.array:
        """What follows attention: (B, hidden) and (B, heads, 1, D) -> (B, hidden)."""
        x = self._forms["out"](attended.reshape(x.shape[0], -1), weights["out"], onto=x)
        normed = mx.fast.rms_norm(x, weights["between"], self._block.post_attention_layernorm.eps)
        inner = [self._forms[name](normed, weights[name]) for name in self._inner]
        gate, up = inner if len(inner) == 2 else mx.split(inner[0], 2, axis=-1)
        return self._forms["down"](exponential.silu(gate) * up, weights["down"], onto=x)


def _joined_in(block: nn.Module) -> list[list[nn.Module]]:
    attention, mlp = block.self_attn, block.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


class DenseBlocks:
    """A whole dense model, one token a row.

    Args: joins_mlp: compute gate and up as one product. Fewer pieces, which a GPU likes; on a CPU the halves would have
        to be copied apart, which costs more (0.9 ms of a 2.5 ms step at 64 rows of the tiny model).
    """

    def __init__(self, model: nn.Module, joins_mlp: bool):
        self._model = model
        self.layers = [Layer(block, joins_mlp) for block in model.layers]

    @staticmethod
    def supports(model: nn.Module) -> bool:
        return type(model) in DENSE and all(Layer.supports(block) for block in model.layers)

    @staticmethod
    def are_alike(model: nn.Module) -> bool:
        """Whether the layers differ by their weights alone, and not by how those are quantised."""
        return len({tuple(_form(group[0]) for group in _joined_in(block)) for block in model.layers}) == 1

    def weights(self) -> Weights:
        """All weights of a step, in its form. Made anew for each rollout: training replaces them."""
        head = self._head_module()
        return {
            "embedding": _held(self._model.model.embed_tokens),
            "layers": [layer.weights() for layer in self.layers],
            "norm": self._model.model.norm.weight,
            "head": {} if head is None else Projection([head]).weights(),
        }

    def _head_module(self) -> nn.Module | None:
        return None if self._model.args.tie_word_embeddings else self._model.lm_head

    def embedded(self, tokens: mx.array, weights: Weights) -> mx.array:
        """(B,) -> (B, hidden)"""
        module, held = self._model.model.embed_tokens, weights["embedding"]
        if not isinstance(module, nn.QuantizedEmbedding):
            return held["weight"][tokens]
        biases = held["biases"][tokens] if "biases" in held else None
        return mx.dequantize(held["weight"][tokens], held["scales"][tokens], biases, **_quantisation(module))

    def logits(self, x: mx.array, weights: Weights) -> mx.array:
        """(B, hidden) -> (B, V)"""
        x = mx.fast.rms_norm(x, weights["norm"], self._model.model.norm.eps)
        head, module, held = self._head_module(), self._model.model.embed_tokens, weights["embedding"]
        if head is not None:
            return Projection([head])(x, weights["head"])
        if not isinstance(module, nn.QuantizedEmbedding):
            return x @ held["weight"].T
        return mx.quantized_matmul(
            x, held["weight"], held["scales"], held.get("biases"), transpose=True, **_quantisation(module)
        )

    def step(
        self, tokens: mx.array, lengths: mx.array, kept: Sequence[Arrays], weights: Weights, column: mx.array | None
    ) -> tuple[mx.array, list[Arrays]]:
        """Read one token a row behind `lengths` (B,) others: logits (B, V), and the keys and values with it in them.

        Args: column: (1,) where all rows write, if it is one place: a slice, which is written 2 to 5 times as fast.
        """
        x = self.embedded(tokens, weights)
        grown: list[Arrays] = []
        look = _masked(lengths, kept[0][0].shape[2])
        for layer, (keys, values), held in zip(self.layers, kept, weights["layers"], strict=True):
            query, key, value = layer.queries_keys_values(x, held, lengths)
            keys, values = _written(keys, key, lengths, column), _written(values, value, lengths, column)
            grown.append((keys, values))
            x = layer.rest(x, look(query, keys, values, layer.attention.scale), held)
        return self.logits(x, weights), grown


def _written(held: mx.array, new: mx.array, lengths: mx.array, column: mx.array | None) -> mx.array:
    new = new.astype(held.dtype)
    if column is not None:
        return mx.slice_update(held, new, column, axes=(2,))
    return mx.put_along_axis(held, mx.broadcast_to(lengths[:, None, None, None], new.shape), new, axis=2)


def _held(module: nn.Module) -> Weights:
    return {name: module[name] for name in ("weight", "scales", "biases") if name in module}


def _quantisation(module: nn.Module) -> dict[str, Any]:
    return {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}


def _masked(lengths: mx.array, columns: int) -> Callable[[mx.array, mx.array, mx.array, float], mx.array]:
    """Attention of one token a row over the columns up to its own."""
    seen = (mx.arange(columns) <= lengths[:, None])[:, None, None]  # (B, 1, 1, columns)
    if not exponential.is_slow():
        return lambda query, keys, values, scale: mx.fast.scaled_dot_product_attention(
            query, keys, values, scale=scale, mask=seen
        )
    biases: dict[tuple[int, ...], mx.array] = {}

    def attend(query: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        rows, kv_heads, _, size = keys.shape
        grouped = (query * scale).reshape(rows, kv_heads, -1, size)
        scores = grouped @ keys.swapaxes(-1, -2)
        if scores.shape not in biases:  # whole, not broadcast: a kernel that need not look up strides is 4 times faster
            biases[scores.shape] = mx.contiguous(mx.broadcast_to(mx.where(seen, 0.0, MASKED), scores.shape))
        scores = scores + biases[scores.shape]
        weights = exponential.exp(scores - mx.max(scores, axis=-1, keepdims=True))
        attended = (weights @ values) / mx.sum(weights, axis=-1, keepdims=True)
        return attended.astype(query.dtype).reshape(query.shape)

    return attend
