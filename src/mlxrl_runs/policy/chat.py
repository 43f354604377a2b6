"""Token in, token out: turns an observation into exactly the tokens that follow what was already read and written.

The chat template is rendered once, on marker texts, and cut into the pieces around them. A conversation then only ever
grows by a suffix; nothing that was sampled is rendered again, so a template that rewrites past turns (Qwen3 drops their
thinking) cannot move a token.
"""

from dataclasses import dataclass
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from mlxrl_runs.core.protocols import Conversation
from mlxrl_runs.errors import ConfigError

REMEMBERED = 1024  # texts, each way
_REMEDY = "Give the model folder another chat_template.jinja, or another model.path."
_FIRST, _ANSWER, _NEXT = "\x02first\x02", "\x02answer\x02", "\x02next\x02"


@dataclass(frozen=True)
class Context:
    """Tokens to append, and the [start, end) span of them that the environment wrote."""

    tokens: tuple[int, ...]
    observation: tuple[int, int]


class ChatFormat:
    """How one tokenizer's conversations are written.

    Args: thinking: passed to the chat template as enable_thinking; None leaves the choice to the template.
    Raises: ConfigError when the template has no such choice, or cannot be cut into pieces.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None):
        self._tokenizer = tokenizer
        # observations and short actions recur; without this the tokenizer takes a sixth of an evaluation (2.8 s -> 2.4)
        self._encode = lru_cache(REMEMBERED)(self._encode_now)
        self._decode = lru_cache(REMEMBERED)(self._decode_now)
        self._thinking = thinking
        self._before_first, self._after_first, self._before_next, self._after_next = _pieces(tokenizer, thinking)

    def first(self, observation: str | Conversation, prefix: str = "") -> Context:
        """The prompt: one message of the user, or a conversation so far, all of it read and none of it trained.

        Args: prefix: what the answer begins with: read by the model, never trained.
        """
        if isinstance(observation, str):
            return self._encode(self._before_first, observation, self._after_first + prefix)
        *earlier, last = observation
        before, after = self._around_last(earlier, last["role"])
        return self._encode(before, last["content"], after + prefix)

    def _around_last(self, earlier: Conversation, role: str) -> tuple[str, str]:
        if not self._tokenizer.chat_template:
            return self._before_first + "".join(f"{message['content']}\n" for message in earlier), self._after_first
        messages = [dict(message) for message in earlier] + [{"role": role, "content": _FIRST}]
        return _cut(_render(self._tokenizer, messages, self._thinking), _FIRST)

    def next(self, observation: str, ended_with_eos: bool, prefix: str = "") -> Context:
        """What follows an action. The end mark of the action is added unless the policy wrote it itself."""
        before = self._before_next
        if ended_with_eos:
            before = before.removeprefix(self._tokenizer.eos_token)
        return self._encode(before, observation, self._after_next + prefix)

    def token_id(self, token: int | str, key: str) -> int:
        """The id of a token given by its id or its text.

        Args: key: the config's key that named it, for messages.
        Raises: ConfigError when the text is not one token, or the id is none of the tokenizer's.
        """
        if isinstance(token, int):
            if not 0 <= token < len(self._tokenizer):
                raise ConfigError(f"{key}: got token {token}; allowed: 0 to {len(self._tokenizer) - 1} with this model")
            return token
        ids = self._tokenizer(token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ConfigError(
                f"{key}: got {token!r}; allowed: a text that is one token of this model, or a token's id. "
                f"This one is {len(ids)}: {', '.join(map(str, ids))}."
            )
        return int(ids[0])

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


def _pieces(tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> tuple[str, str, str, str]:
    """What stands before and after the first observation, and between an answer, the next observation and an answer."""
    template = tokenizer.chat_template
    if thinking is not None and "enable_thinking" not in str(template):
        raise ConfigError(
            f"model.thinking: got {str(thinking).lower()}; this model's chat template does not know enable_thinking, "
            "so nothing would change. Try model.thinking=null."
        )
    if not template:
        return _own_bos(tokenizer), "\n", "\n", "\n"
    messages = [{"role": "user", "content": _FIRST}]
    before_first, after_first = _cut(_render(tokenizer, messages, thinking), _FIRST)
    messages += [{"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
    before_next, after_next = _cut(_cut(_render(tokenizer, messages, thinking), _ANSWER)[1], _NEXT)
    return before_first, after_first, before_next, after_next


def _own_bos(tokenizer: PreTrainedTokenizerBase) -> str:
    """The BOS that the tokenizer itself puts before a text; without a template nothing else would write it."""
    bos = tokenizer.bos_token_id
    return tokenizer.bos_token if bos is not None and tokenizer("a")["input_ids"][0] == bos else ""


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], thinking: bool | None) -> str:
    choice = {} if thinking is None else {"enable_thinking": thinking}
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **choice)
    except Exception as error:  # Jinja's, and whatever a template raises on purpose
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(f"the chat template refuses a conversation of {roles}: {error}. {_REMEDY}") from error


def _cut(text: str, marker: str) -> tuple[str, str]:
    parts = text.split(marker)
    if len(parts) != 2:
        raise ConfigError(
            f"the chat template writes a message {len(parts) - 1} times where once is needed, so its text cannot be "
            f"taken apart into what is read and what is written. {_REMEDY}"
        )
    return parts[0], parts[1]
