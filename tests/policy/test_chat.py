from copy import deepcopy

import pytest

from building import tiny
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.policy.chat import ChatFormat

STRIPS_THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)  # fmt: skip


def tokenizer_with(template):
    tokenizer = deepcopy(tiny().tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def test_a_conversation_grows_by_suffixes_that_render_like_the_template():
    tokenizer = tiny().tokenizer
    chat = ChatFormat(tokenizer)
    first = chat.first("door red")
    action = tokenizer.encode("<action>push</action><|end|>", add_special_tokens=False)
    following = chat.next("door blue", ended_with_eos=True)
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "door red"},
            {"role": "assistant", "content": "<action>push</action>"},
            {"role": "user", "content": "door blue"},
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert [*first.tokens, *action, *following.tokens] == whole


def test_the_end_mark_is_added_when_the_policy_did_not_write_it():
    chat = ChatFormat(tiny().tokenizer)
    written, cut = chat.next("door red", ended_with_eos=True), chat.next("door red", ended_with_eos=False)
    assert cut.tokens == (tiny().tokenizer.eos_token_id, *written.tokens)


def test_the_observation_span_is_what_the_environment_wrote():
    tokenizer = tiny().tokenizer
    context = ChatFormat(tokenizer).next("door blue", ended_with_eos=False)
    start, end = context.observation
    assert tokenizer.decode(context.tokens[start:end]) == "door blue"
    assert ChatFormat(tokenizer).next("", ended_with_eos=False).observation == (0, 0)


def test_h12_a_template_that_rewrites_past_turns_moves_no_token():
    chat = ChatFormat(tokenizer_with(STRIPS_THINKING))
    tokens = [*chat.first("a").tokens, *chat.next("b", ended_with_eos=True).tokens]
    assert tokens == [
        *ChatFormat(tiny().tokenizer).first("a").tokens,
        *ChatFormat(tiny().tokenizer).next("b", True).tokens,
    ]


def test_h13_a_template_that_writes_bos_gives_exactly_one_and_one_that_does_not_gives_none():
    tokenizer = tokenizer_with("<|endoftext|>" + tiny().tokenizer.chat_template)
    tokenizer.bos_token = "<|endoftext|>"
    bos = tokenizer.bos_token_id
    context = ChatFormat(tokenizer).first("a")
    assert context.tokens.count(bos) == 1 and context.tokens[0] == bos
    assert bos not in ChatFormat(tokenizer).next("b", ended_with_eos=True).tokens
    assert bos not in ChatFormat(tiny().tokenizer).first("a").tokens


def test_a_tokenizer_without_a_template_gets_lines():
    tokenizer = tokenizer_with(None)
    chat = ChatFormat(tokenizer)
    assert tokenizer.decode(chat.first("a").tokens) == "a\n"
    assert tokenizer.decode(chat.next("b", ended_with_eos=True).tokens) == "\nb\n"


def test_a_template_that_cannot_be_taken_apart_is_refused():
    twice = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    lost = "{% for m in messages %}{{ m.role }}{% endfor %}"
    for template in (twice, lost):
        with pytest.raises(ConfigError, match=r"writes a message [02] times where once is needed.*chat_template"):
            ChatFormat(tokenizer_with(template))
    refuses = (
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
    )
    with pytest.raises(ConfigError, match=r"refuses a conversation of user, assistant, user: one message only"):
        ChatFormat(tokenizer_with(refuses))


def test_thinking_reaches_the_template_and_is_refused_where_nothing_reads_it():
    reads = tiny().tokenizer.chat_template + "{% if enable_thinking is false %}<think></think>{% endif %}"
    tokenizer = tokenizer_with(reads)
    assert ChatFormat(tokenizer).first("a") == ChatFormat(tokenizer, thinking=True).first("a")
    assert tokenizer.decode(ChatFormat(tokenizer, thinking=False).first("a").tokens).endswith("<think></think>")
    with pytest.raises(ConfigError, match=r"model\.thinking: got false"):
        ChatFormat(tiny().tokenizer, thinking=False)
