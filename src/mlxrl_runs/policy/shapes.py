"""Architectures for `model=random`, by name: dense qwen3 with random weights, for benchmarks and memory work."""

from typing import Any

_COMMON = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def _shape(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int, theta: float
) -> dict[str, Any]:
    return _COMMON | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "rope_theta": theta,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "1m": _shape(4, 128, 384, 4, 2, 32, 2048, 1e4),
    "11m": _shape(8, 320, 960, 5, 5, 64, 4096, 1e4),
    "qwen3_0_6b": _shape(28, 1024, 3072, 16, 8, 128, 151936, 1e6),
    "qwen3_1_7b": _shape(28, 2048, 6144, 16, 8, 128, 151936, 1e6),
    "qwen3_4b": _shape(36, 2560, 9728, 32, 8, 128, 151936, 1e6),
}
