"""mlx-lm-lora 5.10.2 (mlx_lm_lora): how its GRPO samples and trains. It drives mlx-lm's BatchGenerator.

Of its dependencies, what is used here needs only what mlx-lm brings, numpy and tqdm; `datasets` is not among them.
"""

import contextlib
import io
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx.optimizers as optim
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm_lora.trainer.grpo_trainer import GRPOTrainingArgs, generate_grpo, train_grpo

from peers.tokens import WithoutEnd

Rows = tuple[tuple[int, ...], ...]
LEARNING_RATE = 1e-5  # of its command


def groups(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], group_size: int, max_tokens: int, batch: int
) -> Rows:
    """`group_size` rows for each prompt, all of `max_tokens` tokens.

    Args: batch: its batch_size: prompts of a batch, and rows that decode together. Its trainer gives prompts a step.
    """
    found, _, _ = generate_grpo(
        model, WithoutEnd(tokenizer), [list(prompt) for prompt in prompts], max_tokens, group_size, batch, end_token="",
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0,
    )  # fmt: skip
    return tuple(tuple(row.tolist()) for row in found)


class _Counter(TrainingCallback):
    """Hears after the last step how many tokens were trained on: all that were sampled."""

    tokens = 0

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        self.tokens = round(train_info["trained_tokens"])


class Trainer:
    """GRPO steps through its `train_grpo`, on several prompts a step instead of one.

    Args:
        reference: what its command loads beside the policy for the KL term.
        tokenizer: names the end marks.
        reward: (prompt's text, completion's text) -> a number.
    """

    def __init__(self, model: nn.Module, reference: nn.Module, tokenizer: Any, reward: Callable[[str, str], float]):
        self._model, self._reference, self._tokenizer, self._reward = model, reference, tokenizer, reward
        self._optimizer = optim.Adam(learning_rate=LEARNING_RATE)

    def steps(
        self, count: int, texts: Sequence[str], prompts: Sequence[Sequence[int]], group_size: int, max_tokens: int
    ) -> int:
        """Take `count` steps; every loss setting is its default. Saving the adapter once at the end is part of it.

        Returns: how many tokens were sampled.
        """
        counter = _Counter()

        def paid(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
            return [self._reward(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]

        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),  # its bar
        ):
            train_grpo(
                self._model, self._reference, self._tokenizer, self._optimizer,
                [(list(prompt), [], text, "") for prompt, text in zip(prompts, texts, strict=True)],
                reward_funcs=[paid],
                args=GRPOTrainingArgs(
                    iters=count, batch_size=len(texts), group_size=group_size, max_completion_length=max_tokens,
                    temperature=1.0, top_p=1.0, top_k=0, adapter_file=str(Path(folder) / "adapters.safetensors"),
                ),
                training_callback=counter,
                end_answer_token="",
            )  # fmt: skip
        return counter.tokens
