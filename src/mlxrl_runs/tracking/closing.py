"""The last thing a run prints: what it reached, what it took, where it lies, and what to type next."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mlxrl_runs.tracking.drawing import area_chart, readable_bytes, readable_path, readable_seconds

CHART_HEIGHT = 6
CHART_WIDTH = 64
STATE_STYLES = {"finished": "bold green", "interrupted": "bold yellow", "failed": "bold red"}


def closing_words(
    summary: Mapping[str, Any], exit_code: int, rewards: Sequence[float], console: Console
) -> Iterator[RenderableType]:
    """The parts of the summary, top to bottom; what `summary` does not hold is left out.

    Args:
        summary: state, steps, stopped, warnings, evaluation, measured, peaks, seconds, tokens, files, next, device.
            `measured` names the parts of the reward that are logged and not paid for.
        rewards: reward/mean, one number a step.
        console: for its width, and whether it can show more than ASCII.
    """
    yield from _headline(summary, exit_code, console)
    yield from _notes(summary)
    yield from _evaluation(summary.get("evaluation") or {}, summary.get("measured") or ())
    yield from _curve(rewards, console)
    yield from _cost(summary.get("seconds") or {}, summary.get("peaks") or {})
    yield from _totals(summary)
    yield from _pointers(summary)


def _headline(summary: Mapping[str, Any], exit_code: int, console: Console) -> Iterator[RenderableType]:
    state = str(summary.get("state", "finished" if exit_code == 0 else "failed"))
    total = (summary.get("seconds") or {}).get("total")
    words = [state, f"{summary['steps']} steps" if summary.get("steps") else ""]
    words += [f"in {readable_seconds(total)}" if total is not None else "", str(summary.get("device", ""))]
    style = STATE_STYLES.get(state, "bold")
    title = Text("  ".join(word for word in words if word), style=style)
    yield Text()
    yield Rule(title, align="left", style=style, characters="-" if console.options.ascii_only else "─")


def _notes(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Why it ended early, and that there is something to read further up."""
    if stopped := summary.get("stopped"):
        yield Text.assemble(("  stopped early  ", "cyan"), str(stopped))
    if warnings := summary.get("warnings") or ():
        steps = ", ".join(str(warning["step"]) for warning in warnings)
        at = f"at step {steps}" if len(warnings) == 1 else f"at steps {steps}"
        yield Text.assemble((f"  warnings       {len(warnings)}, {at}", "bold yellow"), ": see above, or summary.json")


def _evaluation(evaluation: Mapping[str, Any], measured: Sequence[str]) -> Iterator[RenderableType]:
    """Before and after, beside the random policy (the floor) and the oracle (the ceiling).

    A warm start has a column of its own, and `change` then is what reinforcement learning did after it. Parts of the
    reward that measure rather than pay have rows of their own.
    """
    before, warm, after = (evaluation.get(when) or {} for when in ("before", "warm_start", "after"))
    bounds = after or before
    rows = [(policy, score) for score in ("success", "reward", *measured) for policy in ("sampled", "greedy")]
    rows = [row for row in rows if _pick(before, *row) is not None or _pick(after, *row) is not None]
    if not rows:
        return
    table = _table("held-out tasks", "before", *(["warm start"] if warm else []), "after", "change", "random", "oracle")
    for policy, score in rows:
        old, new, between = (_pick(scores, policy, score) for scores in (before, after, warm))
        table.add_row(
            f"{policy} {score}", _score(old), *([_score(between)] if warm else []), Text(_score(new), style="bold"),
            _change(between if warm else old, new), _score(_pick(bounds, "random", score)),
            _score(_pick(bounds, "oracle", score)),
        )  # fmt: skip
    yield Text()
    yield table


def _pick(evaluation: Mapping[str, Any], policy: str, score: str) -> float | None:
    scores = evaluation.get(policy) or {}
    return scores.get(score, (scores.get("parts") or {}).get(score))


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _change(old: float | None, new: float | None) -> Text:
    if old is None or new is None:
        return Text()
    style = "green" if new > old else "red" if new < old else ""
    return Text(f"{new - old:+.3f}", style=style)


def _curve(rewards: Sequence[float], console: Console) -> Iterator[RenderableType]:
    ascii_only = console.options.ascii_only
    width = min(CHART_WIDTH, console.width - 14)
    lines = area_chart(rewards, width, CHART_HEIGHT, ascii_only=ascii_only)
    if len(rewards) < 2 or not lines:
        return
    margin = len(lines[0].split("|" if ascii_only else "┤")[0]) + 1
    last = str(len(rewards))
    yield Text()
    yield Text("  reward of the sampled episodes, step by step", style="cyan")
    for line in lines:
        yield Text(f"  {line}", style="green", no_wrap=True)
    yield Text(f"  {' ' * margin}1{last:>{width - 1}}", style="dim", no_wrap=True)


def _cost(seconds: Mapping[str, float], peaks: Mapping[str, float]) -> Iterator[RenderableType]:
    phases = [phase for phase in seconds if phase != "total"]
    phases += [phase for phase in peaks if phase not in seconds]
    if not phases:
        return
    table = _table("phase", "seconds", "share", "memory peak")
    total = seconds.get("total") or sum(seconds.values())
    for phase in phases:
        spent, peak = seconds.get(phase), peaks.get(phase)
        table.add_row(
            phase,
            "" if spent is None else f"{spent:.1f}",
            "" if spent is None or not total else f"{spent / total:.0%}",
            "" if peak is None else readable_bytes(peak),
        )
    yield Text()
    yield table


def _totals(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    tokens = [
        f"{count:,.0f} {name.replace('_', ' ')}"
        for name, count in (summary.get("tokens") or {}).items()
        if isinstance(count, int | float)
    ]
    if tokens:
        yield Text()
        yield Text.assemble(("  tokens  ", "cyan"), ", ".join(tokens))


def _pointers(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Paths and commands stand on lines of their own and are never wrapped, so that they can be copied."""
    files: Mapping[str, Any] = summary.get("files") or {}
    if files:
        yield Text()
        width = max(len(label) for label in files)
        for label, path in files.items():
            yield Text.assemble((f"  {label:<{width}}  ", "cyan"), readable_path(str(path)))
    commands: Sequence[str] = summary.get("next") or ()
    if commands:
        yield Text()
        yield Text("  next", style="cyan")
        for command in commands:
            yield Text(f"    {command}", style="bold")
    yield Text()


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column(first, style="cyan", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
