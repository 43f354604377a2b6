"""What several peers are given: a tokenizer that names no end mark."""

from collections.abc import Sequence
from typing import Any


class WithoutEnd:
    """A tokenizer whose texts end nowhere, so that a row ends with its length alone, whatever it writes."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return self._tokenizer.apply_chat_template(messages, **options)

    def encode(self, text: str, **options: Any) -> list[int]:
        return self._tokenizer.encode(text, **options)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)
