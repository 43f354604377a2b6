"""Rollout speed: ours beside other ways to sample with MLX, in one process, on the same weights and prompts.

    python scripts/bench_rollout.py [--cases fixed,geometric,multi_turn,slow_env] [--rows 4,16,64] [--json FILE]

Cases
    fixed       every row writes `--tokens` tokens, whatever it writes (EOS ends nothing, in no system)
    geometric   `--requests` rows of geometric length, a quarter of `--tokens` on average, at most `--slots` at a time
    multi_turn  the doors world, 4 tasks x 8 episodes, ended as the policy ends them
    slow_env    the same world with 20 ms a step against none, 256 episodes, at most `--slots` rows at a time

Columns
    tokens/s    sampled tokens by seconds, the median of interleaved repeats; "spread" is (fastest - slowest) / median
    peak        bytes in use at most, weights and what the system keeps between calls included, other systems' left out
    host        CPU time of the main thread by seconds: Python, and building and submitting graphs. Waiting for results
                costs next to none of it where `waiting_share`, printed above the tables, is near 0
    limit       tokens/s if reading all weights, keys and values once a step, and the products, were all there is, at
                the rates measured in the same run

Systems that go row by row play 4 rows: their speed for each token does not depend on how many follow.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlxrl_runs import backend

BACKEND = backend.prepare()

from benching import Done, Limit, System, measured_limit, opened, surroundings, table, take_turns, with_ratios
from mlxrl_runs.core.protocols import StepResult
from mlxrl_runs.core.trajectory import Trajectory
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.load import Policy
from mlxrl_runs.rollout.engine import EpisodeRequest, Limits, RolloutEngine
from mlxrl_runs.rollout.sampling import Sampling
from peers import mlx_lm_generators

REPEATS = 5
PATIENCE_SECONDS = 30.0  # a system that took so long in a case is not repeated further
ALONE_ROWS = 4  # played by systems that go row by row
GROUP_SIZE = 4
COLUMNS = ("tokens_per_second", "to_batch_generator", "to_one_by_one", "peak_bytes", "host_share", "spread")
ONE_BY_ONE, BATCH_GENERATOR = "ours, one by one", "mlx-lm BatchGenerator"


# ---- the work


@dataclass(frozen=True)
class Work:
    """Single-turn rows: what each reads and how many tokens it writes.

    Attributes:
        texts: what the user says, one for each group. prompts: the same as tokens, the chat template around it.
        lengths: tokens to write, one for each row; rows of a group lie side by side.
    """

    texts: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def group_size(self) -> int:
        return len(self.lengths) // len(self.texts)

    @property
    def row_prompts(self) -> list[tuple[int, ...]]:
        return [prompt for prompt in self.prompts for _ in range(self.group_size)]

    def first(self, rows: int) -> "Work":
        """The first rows alone; as many whole groups as they fill, or a part of the first."""
        groups = max(rows // self.group_size, 1)
        return Work(self.texts[:groups], self.prompts[:groups], self.lengths[:rows])


def work_of(policy: Policy, prompt_tokens: int, lengths: Sequence[int]) -> Work:
    """Groups of 4 rows, or of as many as there are, on prompts of exactly `prompt_tokens` tokens."""
    chat = ChatFormat(policy.tokenizer)
    groups = max(len(lengths) // GROUP_SIZE, 1)
    texts = tuple(_text_of(chat, prompt_tokens, random.Random(number)) for number in range(groups))
    return Work(texts, tuple(chat.first(text).tokens for text in texts), tuple(lengths))


def _text_of(chat: ChatFormat, prompt_tokens: int, generator: random.Random) -> str:
    """Random digits, each of which is a token."""
    around = len(chat.first("1").tokens) - 1
    if prompt_tokens <= around:
        raise ConfigError(f"--prompt-tokens: got {prompt_tokens}; the chat template alone has {around}. Give more.")
    text = "".join(generator.choice("0123456789") for _ in range(prompt_tokens - around))
    found = len(chat.first(text).tokens)
    if found != prompt_tokens:
        raise ConfigError(f"--prompt-tokens: digits are no single tokens here ({found} for {prompt_tokens})")
    return text


class Said:
    """An environment of one turn that says a text and pays nothing."""

    max_turns = 1

    def __init__(self, text: str):
        self._text = text

    def reset(self) -> str:
        return self._text

    def step(self, action: str) -> StepResult:
        return StepResult("", 0.0, True)

    def state_id(self, observation: str) -> str:
        return "said"


# ---- ours


@dataclass(frozen=True)
class Ours:
    """Makes our engines. `options` are keywords of the engine given on the command line."""

    policy: Policy
    options: dict[str, Any]

    def engine(self, limits: Limits, **more: Any) -> RolloutEngine:
        policy, options = self.policy, self.options | more
        return RolloutEngine(policy.model, ChatFormat(policy.tokenizer), policy.eos_ids, limits, **options)


def requests_of(work: Work) -> list[EpisodeRequest]:
    rows = [(group, member) for group in range(len(work.texts)) for member in range(work.group_size)]
    return [
        EpisodeRequest(f"said {group}", member, partial(Said, work.texts[group]), ("bench", group, member))
        for group, member in rows
    ]


def played(engine: RolloutEngine, requests: Sequence[EpisodeRequest]) -> Done:
    trajectories, cost = engine.play(requests, Sampling())
    return Done(cost.sampled_tokens, tuple(map(written, trajectories)), engine.mode_reason)


def written(trajectory: Trajectory) -> tuple[int, ...]:
    """The tokens that the policy wrote, turn after turn."""
    return tuple(token for turn in trajectory.turns for token in turn.action)


# ---- cases


def fixed(ours: Ours, limit: Limit, rows: int, prompt_tokens: int, tokens: int) -> tuple[dict[str, Any], list[System]]:
    work = work_of(ours.policy, prompt_tokens, [tokens] * rows)
    few = work.first(ALONE_ROWS)
    limits = Limits(tokens, prompt_tokens, prompt_tokens + tokens, ignore_eos=True)
    case = {
        "case": "fixed", "rows": rows, "prompt_tokens": prompt_tokens, "tokens": tokens,
        "limit_tokens_per_second": limit.decode_rate(rows, prompt_tokens + tokens / 2),
    }  # fmt: skip
    return case, [
        engine_system("ours", ours, limits, requests_of(work)),
        engine_system(ONE_BY_ONE, ours, limits, requests_of(few), mode="sequential"),
        streamed_system(ours.policy, few),
        batched_system(ours.policy, work, rows),
    ]


def engine_system(name: str, ours: Ours, limits: Limits, requests: Sequence[EpisodeRequest], **options: Any) -> System:
    def prepare() -> Callable[[], Done]:
        engine = ours.engine(limits, **options)
        return lambda: played(engine, requests)

    return System(name, prepare)


def streamed_system(policy: Policy, work: Work) -> System:
    play = lambda: mlx_lm_generators.streamed(policy.model, policy.tokenizer, work.row_prompts, work.lengths)
    return System("mlx-lm stream_generate", lambda: lambda: done(play()))


def batched_system(policy: Policy, work: Work, rows: int) -> System:
    def prepare() -> Callable[[], Done]:
        generator = mlx_lm_generators.Batched(policy.model, work.row_prompts, work.lengths, rows)
        return lambda: done(generator.play(), generator.settings)

    return System(BATCH_GENERATOR, prepare)


def done(rows: Sequence[Sequence[int]], note: str = "") -> Done:
    return Done(sum(map(len, rows)), tuple(map(tuple, rows)), note)


# ---- the whole


def measured(case: dict[str, Any], systems: Sequence[System], repeats: int, patience: float) -> dict[str, Any]:
    take_turns(systems, repeats, patience)
    columns = {"to_batch_generator": BATCH_GENERATOR, "to_one_by_one": ONE_BY_ONE}
    return case | {
        "systems": with_ratios([system.result() for system in systems], columns),
        "equal_rows": equal_rows({system.name: system.done.rows for system in systems}),
    }


def equal_rows(rows: dict[str, tuple[tuple[int, ...], ...]]) -> dict[str, str]:
    """How many rows of our engine's other modes have the tokens of the batched one, which they should have."""
    batched = rows["ours"]
    counts = {}
    for name, own in rows.items():
        if name.startswith("ours, ") and own:
            counts[name] = f"{sum(a == b for a, b in zip(own, batched, strict=False))} of {len(own)}"
    return counts


def shown(case: dict[str, Any]) -> str:
    numbers = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in case.items() if isinstance(value, int))
    lines = [f"## {case['case']}: {numbers}", "", table(case["systems"], COLUMNS)]
    lines += ["", f"limit of this machine: {case['limit_tokens_per_second']:,.0f} tokens/s"]
    lines += [
        f"same tokens as ours: {name.removeprefix('ours, ')} {count}" for name, count in case["equal_rows"].items()
    ]
    return "\n".join([*lines, ""])


def measure(policy: Policy, row_count: int, tokens: int, repeats: int = REPEATS) -> dict[str, Any]:
    """The fixed case in flat names, for reports that hold other things too."""
    case, systems = fixed(Ours(policy, {}), measured_limit(policy), row_count, 24, tokens)
    found = measured(case, systems, repeats, PATIENCE_SECONDS)
    rates = {result["name"]: result["tokens_per_second"] for result in found["systems"]}
    return {
        "rows": row_count, "tokens": tokens, "batched_tokens_per_second": rates["ours"],
        "one_by_one_tokens_per_second": rates[ONE_BY_ONE],
        "mlx_lm_generate_tokens_per_second": rates["mlx-lm stream_generate"],
        "batch_generator_tokens_per_second": rates[BATCH_GENERATOR],
        "limit_tokens_per_second": found["limit_tokens_per_second"],
        "speedup": rates["ours"] / rates[ONE_BY_ONE], "equal_rows": found["equal_rows"][ONE_BY_ONE],
    }  # fmt: skip


def main() -> None:
    arguments = parsed()
    policy = opened(arguments.model, arguments.shape, arguments.precision, arguments.adapter)
    if policy.hidden_size < backend.SHARED_BLAS_FROM:
        backend.use_blas_threads(BACKEND, 1)
    ours, limit = Ours(policy, {}), measured_limit(policy)
    report = surroundings(BACKEND) | {
        "arguments": vars(arguments) | {"json": None},
        "limit": limit.record(),
        "cases": [],
    }
    print(json.dumps({key: report[key] for key in ("backend", "device", "versions", "limit")}))
    for rows in arguments.rows:
        case, systems = fixed(ours, limit, rows, arguments.prompt_tokens, arguments.tokens)
        report["cases"].append(measured(case, systems, arguments.repeats, arguments.patience))
        print("\n" + shown(report["cases"][-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]
    parser.add_argument("--rows", type=numbers, default=[4, 16, 64], help="of the fixed case, with commas")
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48, help="that a row writes, at most")
    parser.add_argument("--model", choices=["tiny", "random"], default="tiny")
    parser.add_argument("--shape", default="11m", help="for --model random")
    parser.add_argument("--precision", choices=["float32", "bfloat16", "4bit"], default="float32")
    parser.add_argument("--adapter", choices=["lora", "full"], default="lora")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, help="seconds; see PATIENCE_SECONDS")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
