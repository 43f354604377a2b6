"""What job=check says: its table, and what to do about a broken gate."""

from collections.abc import Iterator, Mapping

from mlxrl_runs.check.gates import DoesNotApply, Finding, Report
from mlxrl_runs.errors import CheckFailed

ADVICE: Mapping[str, str] = {
    "batched = one by one": "rollout.mode=sequential samples one by one.",
    "compiled = plain": "rollout.compile=never decodes with mlx-lm's own classes.",
    "sampled log-probability = training pass": (
        "model.precision=float32 rounds less; without it, what is trained on is not what was sampled."
    ),
    "adapters off = base": "tracking.kl_every=0 and algorithm.kl_coef=0 compare with no base.",
    "saved adapter = live": "python -m mlxrl_runs.export RUN_DIR --fuse writes a whole model instead.",
    "checkpointed = plain gradient": "memory.checkpoint=none keeps every layer.",
    "micro-batches = whole": "memory.micro_batch_size=0 takes a batch whole.",
}
REPORT = "Please report it with check.json and what `python -m mlxrl_runs job=doctor` prints."


def table(report: Report) -> Iterator[str]:
    """Two lines a gate: the numbers, and how they were measured."""
    width = max(map(len, [*report.found, *report.information]))
    yield f"{'gate':<{width}}  difference   tolerance"
    for name, finding in report.found.items():
        yield from _lines(f"{name:<{width}}", finding)
    for name, told in report.information.items():
        yield from _lines(f"{name:<{width}}", told, is_gate=False)
    yield ""
    yield f"tolerances for {report.tolerance.why}"


def _lines(name: str, finding: Finding | DoesNotApply, is_gate: bool = True) -> Iterator[str]:
    if isinstance(finding, DoesNotApply):
        yield f"{name}  does not apply: {finding.reason}"
        return
    verdict = ("pass" if finding.passed else "BROKEN") if is_gate else "for information"
    allowed = f"{finding.tolerance:.1g}" if is_gate else "-"
    yield f"{name}  {finding.difference:>10.2g}  {allowed:>10}   {verdict}"
    mean, mean_allowed = finding.more.get("mean_difference"), finding.more.get("mean_tolerance")
    means = "" if mean is None else f"; on average {mean:.2g}" + (f" of {mean_allowed:.1g} allowed" if is_gate else "")
    yield f"    {finding.how}{means}"


def require_whole(report: Report) -> None:
    """Raises: CheckFailed naming the broken gates, and what can be done about each."""
    if not report.broken:
        return
    lines = [f"{name}: BROKEN. {ADVICE[name]}" for name in report.broken]
    raise CheckFailed("\n".join([f"{len(lines)} of {len(report.gates)} gates are broken.", *lines, REPORT]))
