"""Batched against sequential rollouts, token by token, on many episodes.

    python scripts/check_equivalence.py [--tokens 100000] [--json FILE]

The two decoders draw from the same keys and may part only where the best two perturbed scores are nearer to each other
than 1e-4, which rounding decides. Such ties are counted; any other difference is an error (exit 1). After a tie the two
episodes go their own ways, so an episode is compared up to there.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mlxrl_runs import backend

BACKEND = backend.prepare()

from mlxrl_runs.check.equivalence import Agreement, play_both
from mlxrl_runs.config import compose_config, validate
from mlxrl_runs.core.seeding import generator
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.load import Policy, open_policy
from mlxrl_runs.rollout.engine import Decoding, RolloutEngine
from mlxrl_runs.rollout.episodes import Limits
from mlxrl_runs.rollout.on_policy import requests_of

TIE = 1e-4
ROWS = 64  # decoded together
UNDER = 50_000  # at most one tie in so many tokens is promised


def is_kept(result: dict[str, Any]) -> bool:
    """Whether what is promised held: at most one tie in so many tokens, and no other difference."""
    return not result["errors"] and result["ties"] <= max(result["tokens"] // UNDER, 1)


def measure(policy: Policy, tokens: int) -> dict[str, Any]:
    """Both decoders on as many episodes as sample `tokens` tokens: what was compared, ties, other differences."""
    chat = ChatFormat(policy.tokenizer)
    ways = (Decoding(mode="sequential"), Decoding())
    engines = [RolloutEngine(policy.model, chat, policy.eos_ids, Limits(16), way) for way in ways]
    found, part = Agreement(), 0
    while found.tokens < tokens:
        name = ("recurring", "arithmetic")[part % 2]
        family = validate(compose_config([f"env={name}"])).env
        stream = generator("equivalence", part)
        tasks = [family.sample_task(stream) for _ in range(ROWS // 4)]
        found += play_both(*engines, requests_of(family, tasks, 4, 0, ("check", part)))
        part += 1
    ties = found.ties(TIE)
    return {"backend": BACKEND.name, "tokens": found.tokens, "ties": ties, "errors": len(found.margins) - ties}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    backend.use_blas_threads(BACKEND, 1)
    policy = open_policy(source="tiny", path=None, shape=None, adapter="lora", seed=0, keep_reference=False, rank=16)
    result = measure(policy, arguments.tokens)
    print(
        f"{result['tokens']:,} sampled tokens compared on {BACKEND.name}: {result['ties']} ties under {TIE:g}, "
        f"{result['errors']} other differences"
    )
    promised = result["tokens"] // UNDER
    print(f"promised: at most one tie in {UNDER:,} tokens, which is {promised} here; no other difference")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if is_kept(result) else 1


if __name__ == "__main__":
    sys.exit(main())
