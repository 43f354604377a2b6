"""Token in, token out: turns an observation into exactly the tokens that follow what was already read and written.

The chat template is rendered once, on marker texts, and cut into the pieces around them. A conversation then only ever
grows by a suffix; nothing that was sampled is rendered again, so a template that rewrites past turns (Qwen3 drops their
thinking) cannot move a token.
"""

from dataclasses import dataclass
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

REMEMBERED = 1024  # texts, each way
_FIRST, _ANSWER, _NEXT = "\x02first\x02", "\x02answer\x02", "\x02next\x02"


@dataclass(frozen=True)
class Context:
    """Tokens to append, and the [start, end) span of them that the environment wrote."""

    tokens: tuple[int, ...]
    observation: tuple[int, int]


class ChatFormat:
    """How one tokenizer's conversations are written."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        # observations and short actions recur; without this the tokenizer takes a sixth of an evaluation (2.8 s -> 2.4)
        self._encode = lru_cache(REMEMBERED)(self._encode_now)
        self._decode = lru_cache(REMEMBERED)(self._decode_now)
        self._before_first, self._after_first, self._before_next, self._after_next = _pieces(tokenizer)

    def first(self, observation: str, prefix: str = "") -> Context:
        """The prompt. `prefix` is what the answer begins with: read by the model, never trained."""
        return self._encode(self._before_first, observation, self._after_first + prefix)

    def next(self, observation: str, ended_with_eos: bool, prefix: str = "") -> Context:
        """What follows an action. The end mark of the action is added unless the policy wrote it itself."""
        before = self._before_next
        if ended_with_eos:
            before = before.removeprefix(self._tokenizer.eos_token)
        return self._encode(before, observation, self._after_next + prefix)

    def action_tokens(self, text: str) -> list[int]:
        """What a policy that writes `text` and ends there has sampled."""
        return [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]

    def action_text(self, action: list[int]) -> str:
        """What the environment reads: special tokens left out."""
        return self._decode(tuple(action))

    def _decode_now(self, action: tuple[int, ...]) -> str:
        return self._tokenizer.decode(list(action), skip_special_tokens=True)

    def _encode_now(self, before: str, observation: str, after: str) -> Context:
        # add_special_tokens=False: the template has written BOS already where the model wants one
        encoded = self._tokenizer(before + observation + after, add_special_tokens=False, return_offsets_mapping=True)
        start, end = len(before), len(before) + len(observation)
        touched = [
            number for number, (left, right) in enumerate(encoded["offset_mapping"]) if left < end and right > start
        ]
        span = (touched[0], touched[-1] + 1) if touched else (0, 0)
        return Context(tuple(encoded["input_ids"]), span)


def _pieces(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str, str]:
    if not tokenizer.chat_template:
        return "", "\n", "\n", "\n"
    messages = [{"role": "user", "content": _FIRST}]
    before_first, after_first = _render(tokenizer, messages).split(_FIRST)
    messages += [{"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
    after_answer = _render(tokenizer, messages).split(_ANSWER)[1]
    before_next, after_next = after_answer.split(_NEXT)
    return before_first, after_first, before_next, after_next


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
