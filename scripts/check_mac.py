"""Does everything hold on this machine, and how fast is it? One JSON file that can be posted.

    python scripts/check_mac.py [--json outputs/check-mac.json] [--small]

Gates: pairs of ways to compute the same, each with the difference found and the one allowed. Benchmarks: rollout,
answering times, one update. Made for Macs, whose GPU no test here has seen; runs on Linux too, and the figures carry
the backend's name. Under three minutes on 2 CPU cores. Exit codes: 0 all gates pass, 1 one does not.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from mlxrl_runs import backend

BACKEND = backend.prepare()

import mlx.core as mx
import mlx.optimizers as optim

import bench_rollout
import bench_startup
from mlxrl_runs.check import gates as check
from mlxrl_runs.config import RunConfig, compose_config, validate
from mlxrl_runs.core.batch import Batch, collate
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.doctor import examine
from mlxrl_runs.memory.meter import Meter
from mlxrl_runs.policy import export
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.load import Policy
from mlxrl_runs.rollout.engine import RolloutEngine
from mlxrl_runs.rollout.episodes import Limits
from mlxrl_runs.rollout.on_policy import group_up, requests_of
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.run import base_logp_of, open_policy_of
from mlxrl_runs.tracking.drawing import readable_bytes
from mlxrl_runs.training.optimizer import LearningRate
from mlxrl_runs.training.update import Updater

LOGIT = 1e-4  # what a logit of the fused export may differ by
PRIVATE = ("executable", "package")  # paths may hold a person's name
SMALL = {"tokens": 300, "rows": 4, "new_tokens": 8, "repeats": 1, "update_rows": 4, "update_tokens": 16}
WHOLE = {"tokens": 8_000, "rows": 32, "new_tokens": 32, "repeats": 3, "update_rows": 8, "update_tokens": 256}


# ---- gates


def of_job_check(name: str) -> Callable[[int], dict[str, Any]]:
    """A gate of job=check on the tiny model."""

    def run(tokens: int) -> dict[str, Any]:
        config = config_of("model=tiny")
        bench = check.Bench(open_policy("model=tiny"), config, base_logp_of(config), tokens=tokens)
        with check.stirred(bench.policy):
            found = check.GATES[name](bench)
        assert isinstance(found, check.Finding), f"{name} applies to the tiny model"
        return found.as_json()

    return run


def fused_is_live(_tokens: int) -> dict[str, Any]:
    """Logits of a policy, and of what mlx-lm opens from its fused export."""
    policy = open_policy("model=tiny")
    with check.stirred(policy), tempfile.TemporaryDirectory() as folder:
        live = export.answer(policy.model, policy.tokenizer)
        export.write_fused(policy, Path(folder), dequantize=False)
        opened = export.reopened(Path(folder), None)
    return check.Finding(live.difference(opened), LOGIT, "logits of a probe").as_json()


GATES: dict[str, Callable[[int], dict[str, Any]]] = {
    **{name: of_job_check(name) for name in check.GATES},
    "fused export = live": fused_is_live,
}


# ---- benchmarks


def rollout(size: dict[str, int]) -> dict[str, Any]:
    return bench_rollout.measure(open_policy("model=tiny"), size["rows"], size["new_tokens"], size["repeats"])


def startup(size: dict[str, int]) -> dict[str, float]:
    return bench_startup.measure(size["repeats"])


def update(size: dict[str, int]) -> dict[str, Any]:
    """One optimizer step on the 11M model: the second, since the first also compiles."""
    model = "model=random"
    policy, meter = open_policy(model), Meter()
    with meter.phase("rollout"):
        batch, algorithm = credited_batch(policy, model, rows=size["update_rows"], tokens=size["update_tokens"])
    updater = updater_of(policy, optim.Adam(learning_rate=1e-4), rows=0, learning_rate=1e-4)
    updater.update(algorithm, batch)
    with meter.phase("update"):
        updater.update(algorithm, batch)
    trained = int(batch.action_mask.sum().item())
    return {
        "rows": batch.rows, "padded_tokens": batch.tokens.shape[1], "trained_tokens": trained,
        "rollout_seconds": meter.seconds["rollout"], "update_seconds": meter.seconds["update"],
        "update_tokens_per_second": trained / meter.seconds["update"],
        "rollout_peak_bytes": meter.peak_bytes["rollout"], "update_peak_bytes": meter.peak_bytes["update"],
    }  # fmt: skip


BENCHMARKS: dict[str, Callable[[dict[str, int]], dict[str, Any]]] = {
    "rollout of the tiny model": rollout,
    "one update of the 11M model": update,
    "answering times": startup,
}


# ---- what both are made of


def config_of(*overrides: str) -> RunConfig:
    return validate(compose_config(overrides))


def open_policy(*overrides: str) -> Policy:
    """A policy as a run would open it, with the BLAS threads that a run would give it."""
    policy = open_policy_of(config_of(*overrides), keep_reference=False)
    threads = 1 if policy.hidden_size < backend.SHARED_BLAS_FROM else THREADS
    if threads is not None:
        backend.use_blas_threads(BACKEND, threads)
    return policy


THREADS = backend.blas_threads(BACKEND)


def credited_batch(policy: Policy, model: str, rows: int, tokens: int) -> tuple[Batch, Any]:
    """Rows of full length, rolled out and credited by GRPO; members' returns are made to differ. Also the algorithm."""
    config = config_of(model, "env=arithmetic", "algorithm=grpo", "group_size=4")
    tasks = config.env.held_out_tasks()[: rows // 4]
    engine = RolloutEngine(policy.model, ChatFormat(policy.tokenizer), policy.eos_ids, Limits(tokens, ignore_eos=True))
    played, _ = engine.play(requests_of(config.env, tasks, 4, 0, ("check",)), Sampling())
    batch = collate(group_up(tasks, played, 4))
    credited = config.algorithm.credit(batch)
    signs = mx.array([1.0, -1.0] * (batch.rows // 2))[:, None]  # whatever the rewards were, there is a gradient
    return credited.with_(advantage=mx.broadcast_to(signs, batch.tokens.shape)), config.algorithm


def updater_of(policy: Policy, optimizer: optim.Optimizer, rows: int, learning_rate: float) -> Updater:
    return Updater(
        policy, optimizer, LearningRate(learning_rate, "constant", 0, 10, 0.1), temperature=1.0, rows=rows,
        checkpoint_every=0, max_grad_norm=None, max_nonfinite=0, seed=0, stop=StopRequest(),
    )  # fmt: skip


# ---- the whole


def measured(size: dict[str, int]) -> dict[str, Any]:
    """Every gate and every benchmark, with what machine they ran on. One that raises is one that does not pass."""
    started = time.perf_counter()
    report = examine(Path("outputs").absolute(), wants_wandb=False)
    machine = {name: public(report.facts[name]) for name in ("system", "mlx", "versions") if name in report.facts}
    gates = {name: attempted(lambda run=run: run(size["tokens"]), {"passed": False}) for name, run in GATES.items()}
    figures = {name: attempted(lambda run=run: run(size), {}) for name, run in BENCHMARKS.items()}
    return {
        "made_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "backend": BACKEND.name,
        "machine": machine,
        "problems": [problem for problem, _ in report.problems],
        "passed": all(found["passed"] for found in gates.values()),
        "gates": gates,
        "benchmarks": figures,
        "seconds": round(time.perf_counter() - started, 1),
    }


def public(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts without paths."""
    shared = {name: value for name, value in facts.items() if name not in PRIVATE}
    return shared | ({"blas": Path(shared["blas"]).name} if shared.get("blas") else {})


def attempted(run: Callable[[], dict[str, Any]], otherwise: dict[str, Any]) -> dict[str, Any]:
    """What a part found; where it raises, that, so that the others still run."""
    try:
        return run()
    except Exception as error:
        return {**otherwise, "error": f"{type(error).__name__}: {error}"}


def table(result: dict[str, Any]) -> str:
    mlx = result["machine"].get("mlx", {})
    lines = [f"{result['backend']}, {mlx.get('device', 'unknown device')}, {mlx.get('blas') or 'its own BLAS'}"]
    width = max(map(len, ["gate", *result["gates"]]))
    lines += ["", f"{'gate':<{width}}{'difference':>12}{'allowed':>12}"]
    for name, found in result["gates"].items():
        verdict = "passed" if found["passed"] else f"FAILED {found.get('error', '')}".rstrip()
        numbers = [f"{found[key]:.2g}" if key in found else "" for key in ("difference", "tolerance")]
        lines.append(f"{name:<{width}}{numbers[0]:>12}{numbers[1]:>12}  {verdict}")
    for name, figures in result["benchmarks"].items():
        lines += ["", name]
        shown = {key: value for key, value in figures.items() if key not in ("backend", "device")}
        lines += [f"  {key.replace('_', ' '):<36}{_written(key, value):>14}" for key, value in shown.items()]
    verdict = "all gates pass" if result["passed"] else "A GATE FAILED"
    return "\n".join([*lines, "", f"{verdict}, {result['seconds']} s"])


def _written(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return readable_bytes(value)
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("outputs/check-mac.json"))
    parser.add_argument("--small", action="store_true", help="in seconds; its figures mean nothing")
    arguments = parser.parse_args(argv)
    result = measured(SMALL if arguments.small else WHOLE)
    print(table(result))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {arguments.json}")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
