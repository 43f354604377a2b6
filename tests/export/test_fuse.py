"""Adapters of every kind, merged into small random models of several families: the fused model is the live one."""

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model
from transformers import AutoTokenizer

from families import FAMILIES, small_model
from mlxrl_runs.policy.adapters import add_adapter
from mlxrl_runs.policy.export import write_fused
from mlxrl_runs.policy.load import TINY, Policy
from mlxrl_runs.policy.source import Located

TOKENS = mx.array([[4, 20, 33, 57, 101, 7]])


def policy_of(family: str, kind: str, bits: int | None) -> Policy:
    """With an adapter that was moved away from doing nothing."""
    model, config = small_model(family), {"model_type": family, **FAMILIES[family]}
    if bits:
        model, config = quantize_model(model, config, group_size=32, bits=bits)
    adapter = add_adapter(model, kind, rank=4, scale=2.0, dropout=0.0, targets="all", seed=0)
    moved = [
        (name, array + 0.05 * mx.random.normal(array.shape, key=mx.random.key(number)))
        for number, (name, array) in enumerate(tree_flatten(model.trainable_parameters()))
    ]
    model.load_weights(moved, strict=False)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    return Policy(model, tokenizer, frozenset({0}), config, Located("random"), adapter)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen2", "dora"), ("qwen3", "dora"), ("qwen3_moe", "lora"), ("qwen3_moe", "dora"), ("qwen3_next", "lora")],
)
def test_a_fused_model_is_its_live_policy(family, kind, bits, tmp_path):
    policy = policy_of(family, kind, bits)
    live = policy.model(TOKENS)
    base = small_model(family)(TOKENS)
    write_fused(policy, tmp_path, dequantize=bits is not None)
    opened, _ = mlx_lm.load(str(tmp_path))
    fused = opened(TOKENS)
    moved = mx.abs(live - base).max().item()
    assert mx.abs(fused - live).max().item() < 1e-3 * moved
