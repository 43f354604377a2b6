"""mlx-lm 0.32's two generators: one prompt after the other, and its continuous batching."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import stream_generate
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

Rows = tuple[tuple[int, ...], ...]


def streamed(model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Rows:
    """`stream_generate` for each row; no token ends a row but its last."""
    endless, sampler = TokenizerWrapper(tokenizer), make_sampler(temp=1.0)
    endless.eos_token_ids = ()  # the argument of the same name only adds to the tokenizer's own
    return tuple(
        tuple(part.token for part in stream_generate(model, endless, list(prompt), max_tokens=length, sampler=sampler))
        for prompt, length in zip(prompts, lengths, strict=True)
    )


class Batched:
    """`BatchGenerator` with `rows` rows at a time, under the fastest of its settings for the work at hand.

    Tried: the default prefill batch of 8 and one as large as the decode batch; every row's prompt read on its own, and
    each distinct prompt read once with its cache handed to all rows that begin with it. Its per-token rows of
    log-probabilities are not read, which spares it work that RL needs.
    """

    def __init__(self, model: nn.Module, prompts: Sequence[Sequence[int]], lengths: Sequence[int], rows: int):
        self._model, self._prompts, self._lengths, self._rows = model, prompts, lengths, rows
        ways = itertools.product(sorted({min(8, rows), rows}), (False, True))
        self._prefill_rows, self._shares = min(ways, key=lambda way: self._seconds(*way))

    @property
    def settings(self) -> str:
        return f"prefill batch {self._prefill_rows}, prompts {'shared' if self._shares else 'each read'}"

    def play(self) -> Rows:
        return self._play(self._prefill_rows, self._shares)

    def _seconds(self, prefill_rows: int, shares: bool) -> float:
        self._play(prefill_rows, shares)
        started = time.perf_counter()
        self._play(prefill_rows, shares)
        return time.perf_counter() - started

    def _play(self, prefill_rows: int, shares: bool) -> Rows:
        generator = BatchGenerator(
            self._model, sampler=make_sampler(temp=1.0), completion_batch_size=self._rows,
            prefill_batch_size=prefill_rows,
        )  # fmt: skip
        given = self._with_shared_prompts() if shares else {"prompts": [list(prompt) for prompt in self._prompts]}
        try:
            names = generator.insert(max_tokens=list(self._lengths), **given)
            tokens: dict[int, list[int]] = {name: [] for name in names}
            while responses := generator.next_generated():
                for response in responses:
                    tokens[response.uid].append(response.token)
        finally:
            generator.close()
        return tuple(tuple(tokens[name]) for name in names)

    def _with_shared_prompts(self) -> dict[str, Any]:
        read = {prompt: self._read(prompt) for prompt in dict.fromkeys(map(tuple, self._prompts))}
        own = [make_prompt_cache(self._model) for _ in self._prompts]
        for prompt, caches in zip(self._prompts, own, strict=True):
            for mine, shared in zip(caches, read[tuple(prompt)], strict=True):
                mine.state = shared.state
        return {
            "prompts": [[prompt[-1]] for prompt in self._prompts],
            "caches": own,
            "all_tokens": [list(prompt[:-1]) for prompt in self._prompts],
        }

    def _read(self, prompt: tuple[int, ...]) -> list[Any]:
        cache = make_prompt_cache(self._model)
        self._model(mx.array([prompt[:-1]]), cache=cache)
        mx.eval([part.state for part in cache])
        return cache
