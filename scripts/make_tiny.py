"""Remake the tiny model that ships in the package: tokenizer, weights, chat template.

It is warm-started on the formats of both built-in environments, not on their solutions: in the doors world it tries
verbs at random, with a wrong habit for each colour; in arithmetic it is right about half of the time; and a share of
its answers is malformed. So there is something left to learn, and a policy gradient has something to start from.
Held-out tasks never appear here.

    python scripts/make_tiny.py [--out DIR] [--steps 1500]
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

from mlxrl_runs import backend

backend.prepare()

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import Model, ModelArgs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mlxrl_runs.config import compose_config, validate
from mlxrl_runs.core.seeding import generator
from mlxrl_runs.envs.recurring import COLOURS, VERBS

ROOT = Path(__file__).resolve().parents[1]
TAGS = ["<think>", "</think>", "<solution>", "</solution>", "<action>", "</action>"]
SPECIAL = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)  # one token a mark: half of the tokens of a turn would be template otherwise
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
MALFORMED_SHARE = 0.3
HABIT_SHARE = 0.3  # of the actions in the doors world
WRONG_SHARE = 0.35  # of the well-formed arithmetic answers

Message = tuple[str, str]


def family(name: str):
    return validate(compose_config([f"env={name}"])).env


def malformed(text: str, stream: random.Random) -> str:
    """One of the ways in which an answer goes wrong: a tag lost, a tag doubled, a part left out."""
    tags = [tag for tag in TAGS if tag in text]
    tag = stream.choice(tags)
    return stream.choice([text.replace(tag, ""), text.replace(tag, tag + tag), text.split(tag)[0] or "?"])


def doors_episode(world, stream: random.Random) -> list[Message]:
    """A policy walks that has a wrong habit for every colour and otherwise tries verbs at random."""
    environment = world.make(world.sample_task(stream), 0, 0)
    observation, messages = environment.reset(), []
    for _ in range(environment.max_turns):
        action = environment.random_action(stream)
        if stream.random() < HABIT_SHARE:
            action = f"<action>{wrong_verb(world, observation.split()[-1])}</action>"
        if stream.random() < MALFORMED_SHARE:
            action = malformed(action, stream)
        messages += [("user", observation), ("assistant", action)]
        result = environment.step(action)
        if result.done:
            break
        observation = result.observation
    return messages


def wrong_verb(world, colour: str) -> str:
    """The habit: a verb that does not open this colour. The layers learn to carry the colour, and no answer."""
    others = [verb for verb in VERBS[: world.verbs] if verb != world.verb_of(colour)]
    return generator("habit", colour).choice(others)


def naming(stream: random.Random) -> list[Message]:
    """Say the colour back: gives the layers a way to carry it, and no hint which verb it wants."""
    colour = stream.choice(COLOURS)
    return [("user", f"name door {colour}"), ("assistant", colour)]


def arithmetic_answer(world, stream: random.Random) -> list[Message]:
    environment = world.make(world.sample_task(stream), 0, 0)
    answer = environment.oracle_action() if stream.random() > WRONG_SHARE else environment.random_action(stream)
    if stream.random() < MALFORMED_SHARE:
        answer = malformed(answer, stream)
    return [("user", environment.reset()), ("assistant", answer)]


def kinds(stream: random.Random) -> list[tuple[Callable[[], list[Message]], float, int]]:
    """(example maker, share of the steps, rows in a batch); one kind a batch, so that little of it is padding."""
    doors, arithmetic = family("recurring"), family("arithmetic")
    return [
        (lambda: doors_episode(doors, stream), 0.15, 24),
        (lambda: naming(stream), 0.15, 64),
        (lambda: arithmetic_answer(arithmetic, stream), 0.7, 128),
    ]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    # single digits, words with their leading space, runs of punctuation; byte level, so any text can be read
    pattern = Regex(r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384 - len(TAGS),
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONFIG["max_position_embeddings"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(messages: list[Message], tokenizer) -> tuple[list[int], list[int]]:
    """Token ids and a mask of what the assistant wrote, its end mark included."""
    ids, mask = [], []
    for role, content in messages:
        for text, learned in [(f"<|{role}|>", False), (f"{content}<|end|>", role == "assistant")]:
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            mask += [int(learned)] * len(piece)
    return ids, mask


def batches(tokenizer, stream: random.Random):
    makers, shares, rows = zip(*kinds(stream), strict=True)
    while True:
        [kind] = stream.choices(range(len(makers)), weights=shares)
        pairs = [encode(makers[kind](), tokenizer) for _ in range(rows[kind])]
        width = max(len(ids) for ids, _ in pairs)
        yield (
            mx.array([ids + [0] * (width - len(ids)) for ids, _ in pairs]),
            mx.array([mask + [0] * (width - len(mask)) for _, mask in pairs]),
        )


def train(model: Model, tokenizer, steps: int, stream: random.Random) -> None:
    def loss_of(model, tokens, mask):
        losses = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()

    schedule = optim.join_schedules(
        [optim.linear_schedule(0, 4e-3, 50), optim.cosine_decay(4e-3, steps - 50, 2e-4)], [50]
    )
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.95], weight_decay=0.01)
    step_fn = nn.value_and_grad(model, loss_of)
    for step, (tokens, mask) in zip(range(steps), batches(tokenizer, stream), strict=False):
        loss, gradient = step_fn(model, tokens, mask)
        gradient, _ = optim.clip_grad_norm(gradient, 1.0)
        optimizer.update(model, gradient)
        mx.eval(loss, model.parameters(), optimizer.state)
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}  ({tokens.shape[0]} x {tokens.shape[1]} tokens)", flush=True)


def save(model: Model, tokenizer, config: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "src/mlxrl_runs/models/tiny")
    parser.add_argument("--steps", type=int, default=1500)
    arguments = parser.parse_args()
    stream = random.Random(0)
    mx.random.seed(0)
    makers = [maker for maker, _, _ in kinds(random.Random(1))]
    texts = ["\n".join(f"{role}\n{content}" for role, content in maker()) for maker in makers for _ in range(1000)]
    tokenizer = make_tokenizer([*texts, *(f" {colour}" for colour in COLOURS for _ in range(200)), *VERBS * 200])
    config = CONFIG | {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = Model(ModelArgs.from_dict(config))
    train(model, tokenizer, arguments.steps, stream)
    save(model, tokenizer, config, arguments.out)
    parameters = sum(array.size for _, array in tree_flatten(model.parameters()))
    print(f"{parameters} parameters, {len(tokenizer)} tokens, written to {arguments.out}")


if __name__ == "__main__":
    main()
