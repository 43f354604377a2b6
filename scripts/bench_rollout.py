"""Rollout speed: many rows decoded together against the same rows one by one, in one process.

    python scripts/bench_rollout.py [--rows 32] [--tokens 64] [--model tiny] [--adapter lora] [--json FILE]

Every action runs to its full length (ignore_eos). "one by one" is rollout.mode=sequential, the plain decoder with
mlx-lm's own caches; "mlx-lm generate" is that library's generator on the same prompts, sampling, one after the other.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from mlxrl_runs import backend

BACKEND = backend.prepare()

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxrl_runs.config import compose_config, validate
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.load import Policy, open_policy
from mlxrl_runs.rollout.engine import EpisodeRequest, Limits, RolloutEngine
from mlxrl_runs.rollout.on_policy import requests_of
from mlxrl_runs.rollout.sampling import Sampling

REPEATS = 7


def requests(rows: int) -> list[EpisodeRequest]:
    family = validate(compose_config(["env=arithmetic"])).env
    return requests_of(family, family.held_out_tasks()[: max(rows // 4, 1)], min(rows, 4), 0, ("bench",))


def engine_rate(
    policy: Policy, mode: str, rows: list[EpisodeRequest], tokens: int, repeats: int
) -> tuple[float, list[list[int]]]:
    """Tokens a second, the median, and what was sampled."""
    limits = Limits(tokens, ignore_eos=True)
    engine = RolloutEngine(policy.model, ChatFormat(policy.tokenizer), policy.eos_ids, limits, mode=mode)
    engine.play(rows[:2], Sampling())
    rates, sampled = [], []
    for _ in range(repeats):
        trajectories, cost = engine.play(rows, Sampling())
        rates.append(cost.sampled_tokens / cost.total_seconds)
        sampled = [trajectory.tokens for trajectory in trajectories]
    return statistics.median(rates), sampled


def generate_rate(policy: Policy, rows: list[EpisodeRequest], tokens: int) -> float:
    """mlx-lm's own generator, one prompt after the other. It stops at EOS, so the tokens it made are counted."""
    tokenizer = TokenizerWrapper(policy.tokenizer, eos_token_ids=[-1])
    chat, sampler = ChatFormat(policy.tokenizer), make_sampler(temp=1.0)
    started, made = time.perf_counter(), 0
    for row in rows:
        prompt = list(chat.first(row.make().reset()).tokens)
        made += sum(1 for _ in stream_generate(policy.model, tokenizer, prompt, max_tokens=tokens, sampler=sampler))
    return made / (time.perf_counter() - started)


def measure(policy: Policy, row_count: int, tokens: int, repeats: int = REPEATS) -> dict[str, Any]:
    """Tokens a second of the three ways, and how many rows got the same tokens batched and one by one."""
    rows = requests(row_count)
    together, batched = engine_rate(policy, "batched", rows, tokens, repeats)
    alone, sequential = engine_rate(policy, "sequential", rows, tokens, repeats)
    return {
        "backend": BACKEND.name, "device": mx.device_info().get("device_name"), "rows": len(rows), "tokens": tokens,
        "batched_tokens_per_second": together, "one_by_one_tokens_per_second": alone,
        "mlx_lm_generate_tokens_per_second": generate_rate(policy, rows, tokens), "speedup": together / alone,
        "equal_rows": sum(a == b for a, b in zip(batched, sequential, strict=True)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", choices=["tiny", "random"], default="tiny")
    parser.add_argument("--shape", default="11m", help="for --model random")
    parser.add_argument("--adapter", choices=["lora", "full"], default="lora")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    policy = open_policy(
        source=arguments.model, path=None, shape=arguments.shape, adapter=arguments.adapter, seed=0,
        keep_reference=False, rank=16,
    )  # fmt: skip
    if policy.hidden_size < backend.SHARED_BLAS_FROM:
        backend.use_blas_threads(BACKEND, 1)
    result = measure(policy, arguments.rows, arguments.tokens)
    together, alone = result["batched_tokens_per_second"], result["one_by_one_tokens_per_second"]
    generate, rows = result["mlx_lm_generate_tokens_per_second"], result["rows"]
    print(f"{rows} rows x {arguments.tokens} tokens, {arguments.model}, {BACKEND.name}")
    print(f"  batched           {together:10,.0f} tokens/s")
    print(f"  one by one        {alone:10,.0f} tokens/s   batched is {together / alone:.1f} times as fast")
    print(f"  mlx-lm generate   {generate:10,.0f} tokens/s   batched is {together / generate:.1f} times as fast")
    print(f"  rows with the same tokens, batched and one by one: {result['equal_rows']} of {rows}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
