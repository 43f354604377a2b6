"""Rollout speed: ours beside other ways to sample with MLX, in one process, on the same weights and prompts.

    python scripts/bench_rollout.py [--cases fixed,geometric,multi_turn,slow_env] [--rows 4,16,64] [--json FILE]

Cases
    fixed       every row writes `--tokens` tokens, whatever it writes (EOS ends nothing, in no system)
    geometric   `--requests` rows of geometric length, a quarter of `--tokens` on average and `--tokens` at most, the
                same for all systems, `--slots` of them at a time
    multi_turn  the doors world, 4 tasks x 8 episodes, ended as the policy ends them
    slow_env    the same world, `--episodes` episodes, `--slots` at a time, with 20 ms a step and with none; as many
                environments answer at once as `--env-threads` says, `--slots` if it says nothing
    exp         e**x of 64 rows of scores, counted in numbers: ours beside MLX's own; measured only when asked for

Columns
    tokens/s    sampled tokens by seconds, the median of interleaved repeats; "spread" is (fastest - slowest) / median
    ours is     how many times as fast ours is; under slow_env the wall time with the sleep, in times without
    peak        bytes in use at most, weights and what the system keeps between calls included, other systems' left out
    host        CPU time of the main thread by seconds: Python, and building and submitting graphs. Waiting for results
                costs next to none of it where `waiting_share`, printed above the tables, is near 0
    limit       tokens/s if reading all weights, keys and values once a step, and the products, were all there is, at
                the rates measured in the same run

Systems that go row by row play 4 rows: their speed for each token does not depend on how many follow. Other packages
are measured where they can be imported: `pip install --no-deps --target FOLDER inductive-mlxrl mlx-lm-lora`, then
PYTHONPATH=FOLDER. mlx-lm-lora samples rows of one length only, and single turns only.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlxrl_runs import backend

BACKEND = backend.prepare()

import mlx.core as mx

from benching import (
    Done,
    Limit,
    System,
    chosen,
    engine_of,
    measured_limit,
    opened,
    surroundings,
    table,
    take_turns,
    with_ratios,
)
from mlxrl_runs.config import compose_config, validate
from mlxrl_runs.core.protocols import Environment, StepResult
from mlxrl_runs.core.seeding import generator
from mlxrl_runs.core.trajectory import Trajectory
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.maths import exponential
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.load import Policy
from mlxrl_runs.policy.precision import is_quantised
from mlxrl_runs.rollout import on_policy
from mlxrl_runs.rollout.engine import RolloutEngine
from mlxrl_runs.rollout.episodes import EpisodeRequest, Limits
from mlxrl_runs.rollout.sampling import Sampling
from peers import mlx_lm_generators

REPEATS = 5
PATIENCE_SECONDS = 30.0
ALONE_ROWS = 4  # played by systems that go row by row
GROUP_SIZE = 4
WORLD_TASKS, WORLD_GROUP_SIZE = 4, 8
SLOW_STEP_SECONDS = 0.02
COLUMNS = (
    "tokens_per_second", "to_batch_generator", "to_one_by_one", "ours_to_it", "peak_bytes", "host_share", "spread",
)  # fmt: skip
OURS, ONE_BY_ONE, BATCH_GENERATOR = "ours", "ours, one by one", "mlx-lm BatchGenerator"
MERGED = "ours, merge_adapter=always"

Rows = tuple[tuple[int, ...], ...]


# ---- the work


@dataclass(frozen=True)
class Work:
    """Single-turn rows: what each reads and how many tokens it writes.

    Attributes:
        texts: what the user says, one for each group. prompts: the same as tokens, the chat template around it.
        lengths: tokens to write, one for each row; rows of a group lie side by side.
    """

    texts: tuple[str, ...]
    prompts: Rows
    lengths: tuple[int, ...]

    @property
    def group_size(self) -> int:
        return len(self.lengths) // len(self.texts)

    @property
    def row_prompts(self) -> Rows:
        return tuple(prompt for prompt in self.prompts for _ in range(self.group_size))

    def first(self, rows: int) -> "Work":
        """The first rows alone; as many whole groups as they fill, or a part of the first."""
        groups = max(rows // self.group_size, 1)
        return Work(self.texts[:groups], self.prompts[:groups], self.lengths[:rows])


def work_of(policy: Policy, prompt_tokens: int, lengths: Sequence[int]) -> Work:
    """Groups of 4 rows, or one of fewer, on prompts of exactly `prompt_tokens` tokens."""
    if len(lengths) > GROUP_SIZE and len(lengths) % GROUP_SIZE:
        raise ConfigError(
            f"--rows, --requests: got {len(lengths)}; rows come in groups of {GROUP_SIZE}. Give a multiple."
        )
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
        return engine_of(self.policy, limits, **(self.options | more))


def requests_of(work: Work) -> list[EpisodeRequest]:
    rows = [(group, member) for group in range(len(work.texts)) for member in range(work.group_size)]
    return [
        EpisodeRequest(f"said {group}", member, partial(Said, work.texts[group]), ("bench", group, member))
        for group, member in rows
    ]


def capped(request: EpisodeRequest, length: int) -> EpisodeRequest:
    """A request whose actions end at `length` tokens, though the engine's limit is higher."""
    return replace(request, max_completion_tokens=length)


def played(engine: RolloutEngine, requests: Sequence[EpisodeRequest]) -> Done:
    trajectories, cost = engine.play(requests, Sampling())
    return Done(cost.sampled_tokens, tuple(map(written, trajectories)), described(engine))


def described(engine: RolloutEngine) -> str:
    """How it decodes, in a word or two."""
    way = engine.mode if engine.mode == "sequential" else engine.choices()["rollout_way"]
    return f"{way}, adapter merged" if engine.merges else f"{way}"


def written(trajectory: Trajectory) -> tuple[int, ...]:
    """The tokens that the policy wrote, turn after turn."""
    return tuple(token for turn in trajectory.turns for token in turn.action)


def engine_system(
    name: str,
    ours: Ours,
    limits: Limits,
    requests: Sequence[EpisodeRequest],
    lengths: Sequence[int] = (),
    **options: Any,
) -> System:
    """Args: lengths: where each request's action ends, if not all at the same limit."""

    def prepare() -> Callable[[], Done]:
        engine = ours.engine(limits, **options)
        own = [capped(request, length) for request, length in zip(requests, lengths, strict=False)] or requests
        return lambda: played(engine, own)

    return System(name, prepare)


# ---- the others


def streamed_system(policy: Policy, work: Work) -> System:
    play = lambda: mlx_lm_generators.streamed(policy.model, policy.tokenizer, work.row_prompts, work.lengths)
    return System("mlx-lm stream_generate", lambda: lambda: done(play()))


def batched_system(policy: Policy, work: Work, rows: int) -> System:
    def prepare() -> Callable[[], Done]:
        generator = mlx_lm_generators.Batched(policy.model, work.row_prompts, work.lengths, rows)
        return lambda: done(generator.play(), generator.settings)

    return System(BATCH_GENERATOR, prepare)


def inductive_systems(policy: Policy, work: Work, few: Work) -> list[System]:
    """Its ways to sample groups whose rows all have one length."""

    def prepare(way: str, own: Work) -> Callable[[], Done]:
        from peers import inductive

        which = (own.texts, own.prompts, own.group_size, own.lengths[0])
        return lambda: done(inductive.groups(way, policy.model, policy.tokenizer, *which))

    ways = {"one by one": few, "batched": work, "batched + compiled": work}
    return [System(f"inductive-mlxrl, {way}", partial(prepare, way, own)) for way, own in ways.items()]


def lora_trainer_systems(policy: Policy, work: Work, few: Work) -> list[System]:
    """As its trainer calls it, and with a batch_size so large that all rows decode together."""

    def prepare(own: Work, batch: int) -> Callable[[], Done]:
        from peers import lora_trainers

        which = (own.prompts, own.group_size, own.lengths[0], batch)
        return lambda: done(lora_trainers.groups(policy.model, policy.tokenizer, *which))

    by_prompts = few if len(work.prompts) == 1 else work  # with batch_size=1 it goes row by row
    return [
        System("mlx-lm-lora, batch_size=prompts", partial(prepare, by_prompts, len(by_prompts.prompts))),
        System("mlx-lm-lora, batch_size=rows", partial(prepare, work, len(work.lengths))),
    ]


def done(rows: Sequence[Sequence[int]], note: str = "") -> Done:
    return Done(sum(map(len, rows)), tuple(map(tuple, rows)), note)


# ---- cases


@dataclass(frozen=True)
class Size:
    """How much of each case is measured; see the arguments of the command."""

    rows: tuple[int, ...] = (4, 16, 64)
    prompt_tokens: int = 24
    tokens: int = 48
    requests: int = 128
    slots: int = 32
    episodes: int = 256


Case = tuple[dict[str, Any], list[System]]


def fixed(ours: Ours, limit: Limit, size: Size) -> list[Case]:
    return [fixed_rows(ours, limit, size, rows) for rows in size.rows]


def fixed_rows(ours: Ours, limit: Limit, size: Size, rows: int) -> Case:
    policy, prompt_tokens, tokens = ours.policy, size.prompt_tokens, size.tokens
    work = work_of(policy, prompt_tokens, [tokens] * rows)
    few = work.first(ALONE_ROWS)
    limits = Limits(tokens, prompt_tokens, prompt_tokens + tokens, ignore_eos=True)
    case = {
        "case": "fixed", "rows": rows, "prompt_tokens": prompt_tokens, "tokens": tokens,
        "limit_tokens_per_second": limit.decode_rate(rows, prompt_tokens + tokens / 2),
    }  # fmt: skip
    return case, [
        engine_system(OURS, ours, limits, requests_of(work)),
        *(
            [engine_system(MERGED, ours, limits, requests_of(work), merge_adapter="always")]
            if is_packed(policy)
            else []
        ),
        engine_system(ONE_BY_ONE, ours, limits, requests_of(few), mode="sequential"),
        streamed_system(policy, few),
        batched_system(policy, work, rows),
        *inductive_systems(policy, work, few),
        *lora_trainer_systems(policy, work, few),
    ]


def is_packed(policy: Policy) -> bool:
    """Whether merging is not what a run does by itself."""
    return policy.adapter_config is not None and is_quantised(policy.model)


def geometric(ours: Ours, limit: Limit, size: Size) -> list[Case]:
    policy, prompt_tokens, tokens, slots = ours.policy, size.prompt_tokens, size.tokens, size.slots
    lengths = geometric_lengths(size.requests, tokens)
    work = work_of(policy, prompt_tokens, lengths)
    few = work.first(ALONE_ROWS)
    limits = Limits(tokens, prompt_tokens, prompt_tokens + tokens, ignore_eos=True)
    requests = requests_of(work)
    context = sum(length * (prompt_tokens + length / 2) for length in lengths) / sum(lengths)
    case = {
        "case": "geometric", "requests": size.requests, "slots": slots, "prompt_tokens": prompt_tokens,
        "tokens": tokens, "limit_tokens_per_second": limit.decode_rate(slots, context),
    }  # fmt: skip
    return [(case, [
        engine_system(OURS, ours, limits, requests, lengths, max_rows=slots),
        waves_system(ours, work, slots),
        engine_system(ONE_BY_ONE, ours, limits, requests[:ALONE_ROWS], lengths, mode="sequential"),
        streamed_system(policy, few),
        batched_system(policy, work, slots),
        inductive_lengths_system(policy, few),
    ])]  # fmt: skip


def geometric_lengths(rows: int, cap: int) -> list[int]:
    """Lengths that end with the same probability at every token, cap / 4 on average before they are cut at `cap`."""
    stream, stop = generator("bench", "lengths"), min(4 / cap, 1.0)
    length_of = lambda: next((length for length in range(1, cap) if stream.random() < stop), cap)
    return [length_of() for _ in range(rows)]


def waves_system(ours: Ours, work: Work, slots: int) -> System:
    """The baseline: `slots` rows at a time, each wave decoded to its longest row; only what was asked for counts."""

    def prepare() -> Callable[[], Done]:
        waves = [slice(start, start + slots) for start in range(0, len(work.lengths), slots)]
        rows = requests_of(work)
        engines = [ours.engine(Limits(max(work.lengths[wave]), ignore_eos=True)) for wave in waves]

        def play() -> Done:
            longest = [
                row for engine, wave in zip(engines, waves, strict=True) for row in played(engine, rows[wave]).rows
            ]
            return done([row[:length] for row, length in zip(longest, work.lengths, strict=True)])

        return play

    return System("ours, fixed waves", prepare)


def inductive_lengths_system(policy: Policy, work: Work) -> System:
    def prepare() -> Callable[[], Done]:
        from peers import inductive

        which = (work.row_prompts, work.lengths)
        return lambda: done(inductive.rows_of_lengths(policy.model, policy.tokenizer, *which))

    return System("inductive-mlxrl, one by one", prepare)


def multi_turn(ours: Ours, limit: Limit, size: Size) -> list[Case]:
    config = validate(compose_config(["env=recurring"]))
    limits = Limits(config.rollout.max_completion_tokens)
    tasks = config.env.held_out_tasks()[:WORLD_TASKS]
    requests = on_policy.requests_of(config.env, tasks, WORLD_GROUP_SIZE, 0, ("bench",))
    case = {"case": "multi_turn", "tasks": WORLD_TASKS, "group_size": WORLD_GROUP_SIZE}
    return [(case, [
        engine_system(OURS, ours, limits, requests),
        engine_system(ONE_BY_ONE, ours, limits, requests[:ALONE_ROWS], mode="sequential"),
        inductive_episodes_system(ours.policy, config.env.make, tasks[:1], limits.max_completion_tokens),
    ])]  # fmt: skip


def inductive_episodes_system(policy: Policy, make: Any, tasks: Sequence[str], max_tokens: int) -> System:
    """Its tasks follow one another, so one of them shows its speed. Tokens behind an end mark count for it too."""

    def prepare() -> Callable[[], Done]:
        from peers import inductive

        which = (make, tasks, WORLD_GROUP_SIZE, max_tokens)
        return lambda: done(inductive.episodes(policy.model, policy.tokenizer, *which))

    return System("inductive-mlxrl, agentic", prepare)


class Slow:
    """An environment that takes its time over every step."""

    def __init__(self, environment: Environment):
        self._environment = environment
        self.max_turns = environment.max_turns

    def reset(self) -> Any:
        return self._environment.reset()

    def step(self, action: str) -> StepResult:
        time.sleep(SLOW_STEP_SECONDS)
        return self._environment.step(action)

    def state_id(self, observation: str) -> str:
        return self._environment.state_id(observation)


def slow_env(ours: Ours, limit: Limit, size: Size) -> list[Case]:
    config = validate(compose_config(["env=recurring"]))
    limits = Limits(config.rollout.max_completion_tokens)
    tasks = config.env.held_out_tasks()[: size.episodes // GROUP_SIZE]
    instant = on_policy.requests_of(config.env, tasks, GROUP_SIZE, 0, ("bench",))
    slow = [replace(request, make=lambda make=request.make: Slow(make())) for request in instant]
    threads = ours.options.get("env_threads", size.slots)
    case = {
        "case": "slow_env", "episodes": len(instant), "slots": size.slots, "env_threads": threads,
        "step_milliseconds": 20,
    }  # fmt: skip
    return [(case, [
        engine_system(OURS, ours, limits, instant, max_rows=size.slots),
        engine_system("ours, slow env", ours, limits, slow, max_rows=size.slots, env_threads=threads),
    ])]  # fmt: skip


def exp(ours: Ours, limit: Limit, size: Size) -> list[Case]:
    scores = mx.random.normal((64, ours.policy.config["vocab_size"]))

    def system(name: str, function: Callable[[mx.array], mx.array]) -> System:
        def play() -> Done:
            mx.eval(function(scores))
            return Done(scores.size)

        return System(name, lambda: play)

    return [({"case": "exp", "numbers": scores.size}, [system(OURS, exponential.exp), system("MLX's exp", mx.exp)])]


CASES: dict[str, Callable[[Ours, Limit, Size], list[Case]]] = {
    "fixed": fixed, "geometric": geometric, "multi_turn": multi_turn, "slow_env": slow_env, "exp": exp,
}  # fmt: skip


# ---- the whole


def measured(case: dict[str, Any], systems: Sequence[System], repeats: int, patience: float) -> dict[str, Any]:
    take_turns(systems, repeats, patience)
    columns = {"to_batch_generator": BATCH_GENERATOR, "to_one_by_one": ONE_BY_ONE}
    return case | {
        "systems": with_ratios([system.result() for system in systems], columns, OURS),
        "equal_rows": equal_rows({system.name: system.done.rows for system in systems}),
    }


def equal_rows(rows: dict[str, Rows]) -> dict[str, str]:
    """How many rows of our engine's other modes have the tokens of the batched one, which they should have."""
    counts = {}
    for name, own in rows.items():
        if name.startswith(f"{OURS}, ") and name != MERGED and own and rows.get(OURS):
            counts[name] = f"{sum(a == b for a, b in zip(own, rows[OURS], strict=False))} of {len(own)}"
    return counts


def shown(case: dict[str, Any]) -> str:
    numbers = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in case.items() if isinstance(value, int))
    lines = [f"## {case['case']}: {numbers}", "", table(case["systems"], COLUMNS), ""]
    if "limit_tokens_per_second" in case:
        lines.append(f"limit of this machine: {case['limit_tokens_per_second']:,.0f} tokens/s")
    lines += [f"{name}: {count} rows have the same tokens as ours" for name, count in case["equal_rows"].items()]
    return "\n".join([*lines, ""])


def measure(policy: Policy, row_count: int, tokens: int, repeats: int = REPEATS) -> dict[str, Any]:
    """The fixed case of our engine and mlx-lm's, in flat names, for reports that hold other things too."""
    size = Size(rows=(row_count,), tokens=tokens)
    case, systems = fixed_rows(Ours(policy, {}), measured_limit(policy), size, row_count)
    found = measured(case, systems[:4], repeats, PATIENCE_SECONDS)
    rates = {result["name"]: result["tokens_per_second"] for result in found["systems"]}
    return {
        "rows": row_count, "tokens": tokens, "batched_tokens_per_second": rates[OURS],
        "one_by_one_tokens_per_second": rates[ONE_BY_ONE],
        "mlx_lm_generate_tokens_per_second": rates["mlx-lm stream_generate"],
        "batch_generator_tokens_per_second": rates[BATCH_GENERATOR],
        "limit_tokens_per_second": found["limit_tokens_per_second"],
        "speedup": rates[OURS] / rates[ONE_BY_ONE], "equal_rows": found["equal_rows"][ONE_BY_ONE],
    }  # fmt: skip


def main() -> None:
    given = parsed()
    policy = opened(given.model, given.shape, given.precision, given.adapter)
    if policy.hidden_size < backend.SHARED_BLAS_FROM:
        backend.use_blas_threads(BACKEND, 1)
    options = {"merge_adapter": given.merge_adapter, "compile_when": given.compile, "env_threads": given.env_threads}
    ours = Ours(policy, {name: value for name, value in options.items() if value is not None})
    limit = measured_limit(policy)
    size = Size(given.rows, given.prompt_tokens, given.tokens, given.requests, given.slots, given.episodes)
    report = surroundings(BACKEND) | {"arguments": vars(given) | {"json": None}, "limit": limit.record(), "cases": []}
    print(json.dumps({key: report[key] for key in ("backend", "device", "versions", "limit")}))
    for name in given.cases:
        for case, systems in CASES[name](ours, limit, size):
            wanted = chosen(systems, given.systems)
            report["cases"].append(measured(case, wanted, given.repeats, given.patience))
            print("\n" + shown(report["cases"][-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cases", type=_names, default=tuple(CASES)[:-1], help="with commas")
    add("--rows", type=_numbers, default=Size.rows, help="of the fixed case, with commas")
    add("--prompt-tokens", type=int, default=Size.prompt_tokens)
    add("--tokens", type=int, default=Size.tokens, help="that a row writes, at most")
    add("--requests", type=int, default=Size.requests)
    add("--slots", type=int, default=Size.slots)
    add("--episodes", type=int, default=Size.episodes)
    add("--model", choices=["tiny", "random"], default="tiny")
    add("--shape", default="11m", help="for --model random")
    add("--precision", choices=["float32", "bfloat16", "4bit"], default="float32")
    add("--adapter", choices=["lora", "full"], default="lora")
    add("--merge-adapter", choices=["auto", "always", "never"], help="of our engine; its own default if left out")
    add("--compile", choices=["auto", "always", "never"], help="of our engine; its own default if left out")
    add("--env-threads", type=int, help="of our engine; its own default if left out, but see slow_env")
    add("--systems", type=lambda text: text.split(";"), default=(), help="their names as the table has them, with ;")
    add("--repeats", type=int, default=REPEATS)
    add("--patience", type=float, default=PATIENCE_SECONDS, help="a system that took so many seconds is not repeated")
    add("--json", type=Path)
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}; there are {', '.join(CASES)}")
    return names


if __name__ == "__main__":
    main()
