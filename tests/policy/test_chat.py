from copy import deepcopy
from dataclasses import dataclass

import mlx.core as mx
import pytest

from building import tiny
from chat_templates import CHATML, QWEN3, small_tokenizer
from families import small_model
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.protocols import StepResult
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.rollout.engine import RolloutEngine
from mlxrl_runs.rollout.episodes import EpisodeRequest, Limits
from mlxrl_runs.rollout.sampling import Sampling


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


@pytest.mark.parametrize("thinking", [None, True, False])
def test_h12_a_template_that_drops_past_thinking_moves_no_token(thinking):
    tokenizer = small_tokenizer(QWEN3)
    chat = ChatFormat(tokenizer, thinking)
    answer = "<think>\nred is push\n</think>\n\npush"
    first = chat.first("door red")
    written = [*first.tokens, *chat.action_tokens(answer)]
    conversation = [*written, *chat.next("door blue", ended_with_eos=True).tokens]
    assert conversation[: len(written)] == written
    empty = "<think>\n\n</think>\n\n" if thinking is False else ""
    assert tokenizer.decode(conversation) == (
        f"<|im_start|>user\ndoor red<|im_end|>\n<|im_start|>assistant\n{empty}{answer}<|im_end|>\n"
        f"<|im_start|>user\ndoor blue<|im_end|>\n<|im_start|>assistant\n{empty}"
    )
    # the template itself, asked for the whole conversation, would have rewritten the first answer
    messages = [
        {"role": "user", "content": "door red"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "door blue"},
    ]
    assert "red is push" not in tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("thinking", [None, False])
def test_h12_an_episode_begins_with_what_was_fed_and_sampled_and_trains_what_was_sampled(thinking):
    tokenizer = small_tokenizer(QWEN3)
    model = small_model("qwen3", len(tokenizer))
    engine = RolloutEngine(
        model, ChatFormat(tokenizer, thinking), frozenset({tokenizer.eos_token_id}), Limits(max_completion_tokens=6)
    )
    request = EpisodeRequest("talk", 0, lambda: Talk("door red"), ("seed",))
    [episode], _ = engine.play([request], Sampling())
    first, second, third = episode.turns
    start = [*first.context, *first.action]
    assert list(episode.tokens[: len(start) + len(second.context)]) == [*start, *second.context]
    assert len(episode.tokens) == sum(len(turn.context) + len(turn.action) for turn in (first, second, third))
    batch = collate([Group("talk", (episode,))])
    trained = [
        token for token, acts in zip(batch.tokens[0].tolist(), batch.action_mask[0].tolist(), strict=True) if acts
    ]
    assert trained == [*first.action, *second.action, *third.action]


@dataclass
class Talk:
    """Says the same thing three times."""

    opening: object
    max_turns: int = 3

    def reset(self):
        return self.opening

    def step(self, action):
        return StepResult("door blue", 1.0, False)

    def state_id(self, observation):
        return observation


def history(answer):
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "3+3"},
    ]


def test_h08_a_given_history_is_read_and_never_trained():
    tokenizer = small_tokenizer(CHATML)
    engine = RolloutEngine(
        small_model("qwen3", len(tokenizer)),
        ChatFormat(tokenizer),
        frozenset({tokenizer.eos_token_id}),
        Limits(max_completion_tokens=5, ignore_eos=True),
    )

    def played(answer):
        requests = [EpisodeRequest("task", n, lambda: Talk(history(answer), 1), ("seed", n)) for n in range(2)]
        episodes, statistics = engine.play(requests, Sampling())
        return episodes, collate([Group("task", tuple(episodes))]), statistics

    episodes, batch, statistics = played("4")
    prompt = tokenizer.apply_chat_template(history("4"), add_generation_prompt=True, return_dict=False)
    assert [list(episode.turns[0].context) for episode in episodes] == [prompt, prompt]  # one group, one prompt
    assert batch.action_mask.sum().item() == statistics.sampled_tokens == 2 * 5
    start, end = episodes[0].turns[0].observation
    assert tokenizer.decode(prompt[start:end]) == "3+3" == episodes[0].turns[0].state
    _, other, _ = played("5")
    assert mx.array_equal(other.action_mask, batch.action_mask)
    assert not mx.array_equal(other.tokens, batch.tokens)


def test_a_history_without_a_template_is_lines():
    tokenizer = small_tokenizer(None)
    text = tokenizer.decode(ChatFormat(tokenizer).first(history("4"), prefix="3+3 =").tokens)
    assert text == "Be brief.\n2+2\n4\n3+3\n3+3 ="


@pytest.mark.parametrize(
    ("template", "adds_bos", "expected"),
    [
        ("{{ bos_token }}" + CHATML, True, 1),
        (CHATML, False, 0),
        (None, True, 1),
        (None, False, 0),
    ],
    ids=["both write it", "neither", "no template", "no template, no BOS"],
)  # fmt: skip
def test_h13_a_conversation_begins_with_bos_once_where_the_model_has_one_and_nowhere_else(template, adds_bos, expected):
    tokenizer = small_tokenizer(template, adds_bos)
    chat = ChatFormat(tokenizer)
    bos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for opening in ("door red", history("4")):
        tokens = chat.first(opening).tokens
        assert tokens.count(bos) == expected
        assert (tokens[0] == bos) == bool(expected)
    assert bos not in chat.next("door blue", ended_with_eos=True).tokens
    assert bos not in chat.action_tokens("push")


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
