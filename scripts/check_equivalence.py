"""Batched against sequential rollouts, token by token, on many episodes.

    python scripts/check_equivalence.py [--tokens 100000] [--json FILE]

The two decoders draw from the same keys and may part only where the best two perturbed scores are nearer to each other
than 1e-4, which rounding decides. Such ties are counted; any other difference is an error (exit 1). After a tie the two
episodes go their own ways, so an episode is compared up to there.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxrl_runs import backend

BACKEND = backend.prepare()

from mlxrl_runs.config import compose_config, validate
from mlxrl_runs.core.seeding import generator
from mlxrl_runs.core.trajectory import Trajectory
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.load import Policy, open_policy
from mlxrl_runs.rollout.engine import Decoding, RolloutEngine
from mlxrl_runs.rollout.episodes import Limits
from mlxrl_runs.rollout.on_policy import requests_of
from mlxrl_runs.rollout.sampling import Sampling

TIE = 1e-4
ROWS = 64  # decoded together
UNDER = 50_000  # at most one tie in so many tokens is promised


def compare(alone: Trajectory, together: Trajectory, margins: Sequence[float]) -> tuple[int, float | None]:
    """How many action tokens were compared, and the margin where the two part (None where they do not)."""
    drawn = [[token for turn in row.turns for token in turn.action] for row in (alone, together)]
    for number, (one, other) in enumerate(zip(*drawn, strict=False)):
        if one != other:
            return number + 1, margins[number]
    return len(drawn[0]), None


def is_kept(result: dict[str, Any]) -> bool:
    """Whether what is promised held: at most one tie in so many tokens, and no other difference."""
    return not result["errors"] and result["ties"] <= max(result["tokens"] // UNDER, 1)


def measure(policy: Policy, tokens: int) -> dict[str, Any]:
    """Both decoders on as many episodes as sample `tokens` tokens: what was compared, ties, other differences."""
    chat = ChatFormat(policy.tokenizer)
    ways = (Decoding(mode="sequential"), Decoding())
    engines = [RolloutEngine(policy.model, chat, policy.eos_ids, Limits(16), way) for way in ways]
    compared, ties, errors, part = 0, 0, 0, 0
    while compared < tokens:
        name = ("recurring", "arithmetic")[part % 2]
        family = validate(compose_config([f"env={name}"])).env
        stream = generator("equivalence", part)
        requests = requests_of(family, [family.sample_task(stream) for _ in range(ROWS // 4)], 4, 0, ("check", part))
        alone, _ = engines[0].play(requests, Sampling())
        together, statistics = engines[1].play(requests, Sampling(), with_margins=True)
        assert statistics.margins is not None
        for request, one, other in zip(requests, alone, together, strict=True):
            count, margin = compare(one, other, statistics.margins[request.key])
            compared += count
            ties += margin is not None and margin < TIE
            errors += margin is not None and margin >= TIE
        part += 1
    return {"backend": BACKEND.name, "tokens": compared, "ties": ties, "errors": errors}


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
