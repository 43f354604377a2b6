"""Very small random models of several families, float32."""

from importlib import import_module

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": 128, "rope_theta": 1e4,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip
LINEAR_ATTENTION = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5, "full_attention_interval": 2,
}  # fmt: skip
FAMILIES = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "gemma3_text": SIZES
    | {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32, "rope_local_base_freq": 1e4},
    "gemma2": SIZES | {"num_key_value_heads": 2, "query_pre_attn_scalar": 32},  # computes attention itself
    "qwen3_moe": SIZES | EXPERTS,
    "qwen3_5": SIZES | LINEAR_ATTENTION,
    "qwen3_next": SIZES | EXPERTS | LINEAR_ATTENTION,
}
MIXTURES = ("qwen3_moe", "qwen3_next")


def small_model(family: str, vocab_size: int = 128):
    module = import_module(f"mlx_lm.models.{family}")
    sizes = {"model_type": family} | FAMILIES[family] | {"vocab_size": vocab_size}
    model = module.Model(module.ModelArgs.from_dict(sizes))

    def drawn(name: str, array: mx.array) -> mx.array:
        if array.ndim < 2:  # norms, decay rates
            return array
        key = mx.random.key(len(name) + array.size + sum(map(ord, name)))
        return mx.random.normal(array.shape, scale=array.shape[-1] ** -0.5, key=key)

    model.update(tree_map_with_path(drawn, model.parameters()))
    if family in ("qwen3_5", "qwen3_next"):  # the one-dimensional parameter that is drawn at random
        model.load_weights(
            [(name, mx.zeros_like(array)) for name, array in tree_flatten(model.parameters()) if "A_log" in name],
            strict=False,
        )
    model.eval()
    return model
