"""Curves of metrics over steps, drawn as one SVG without any plotting library."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

PANEL_WIDTH, PANEL_HEIGHT = 320, 190
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 26  # around a panel's plot
COLUMNS = 3
HEAD, LEGEND_ROW = 30, 18
LETTER = 0.6  # width of a letter, as a share of its size
COLOURS = ("#2563a8", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0e7490", "#a16207", "#475569")
PREFIXES = ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki"))


@dataclass(frozen=True)
class Figure:
    """A drawing; a notebook shows it, `save` writes it."""

    svg: str

    def _repr_html_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> Path:
        """Write the SVG and return where it is."""
        target = Path(path)
        target.write_text(self.svg + "\n", encoding="utf-8")
        return target


def draw_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str], title: str) -> Figure:
    """One panel a metric, one line a run.

    Args:
        runs: rows of metrics.jsonl by label. A row without a metric, or with null, is left out of its line.
        names: metrics; one that no run has gets no panel.
    Raises: ValueError when no run has any of them.
    """
    panels = [name for name in names if any(_points(rows, name) for rows in runs.values())]
    if not panels:
        raise ValueError(f"none of {', '.join(names)} was logged; see the names in metrics.jsonl")
    columns = min(COLUMNS, len(panels))
    width = columns * PANEL_WIDTH
    entries, legend = _legend(list(runs), width) if len(runs) > 1 else ([], 0)
    height = HEAD + legend + math.ceil(len(panels) / columns) * PANEL_HEIGHT
    parts = [_text(LEFT, 20, _cut(title, width - LEFT - RIGHT, 15), size=15, weight="bold", hint=title), *entries]
    for index, name in enumerate(panels):
        across, down = index % columns * PANEL_WIDTH, HEAD + legend + index // columns * PANEL_HEIGHT
        parts.append(f'<g transform="translate({across},{down})">{_panel(runs, name)}</g>')
    return Figure(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(title)}">'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(parts)}</svg>'
    )


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _panel(runs: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> str:
    lines = {label: _points(rows, name) for label, rows in runs.items()}
    everything = [point for points in lines.values() for point in points]
    first, last = _range([step for step, _ in everything])
    low, high = _range([value for _, value in everything])

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = LEFT + (point[0] - first) / (last - first) * (PANEL_WIDTH - LEFT - RIGHT)
        up = (point[1] - low) / (high - low) * (PANEL_HEIGHT - TOP - BOTTOM)
        return across, PANEL_HEIGHT - BOTTOM - up

    parts = [_text(LEFT, 18, name, size=12)]
    marks = (low, (low + high) / 2, high)
    for value, text in zip(marks, _numbers(marks, name), strict=True):
        _, down = place((first, value))
        parts.append(f'<line x1="{LEFT}" x2="{PANEL_WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 5, down + 4, text, anchor="end"))
    for step, anchor in ((first, "start"), (last, "end")):
        parts.append(_text(place((step, low))[0], PANEL_HEIGHT - 8, f"{step:g}", anchor=anchor))
    for colour, points in zip(_colours(len(lines)), lines.values(), strict=True):
        parts.append(_line([place(point) for point in points], colour))
    return "".join(parts)


def _line(places: Sequence[tuple[float, float]], colour: str) -> str:
    if len(places) < 12:  # few enough to be seen one by one
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places)
    else:
        dots = ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>{dots}'


def _legend(labels: Sequence[str], width: float) -> tuple[list[str], int]:
    """The entries, in as many rows as they need, and the height of these."""
    parts, across, row = [], float(LEFT), 0
    for colour, label in zip(_colours(len(labels)), labels, strict=True):
        shown = _cut(label, width - LEFT - RIGHT - 19)
        taken = 19 + LETTER * 11 * len(shown)
        if across > LEFT and across + taken > width - RIGHT:
            across, row = float(LEFT), row + 1
        down = HEAD + row * LEGEND_ROW
        parts.append(f'<rect x="{across:.1f}" y="{down + 2}" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(across + 19, down + 8, shown, hint=label))
        across += taken + 17
    return parts, (row + 1) * LEGEND_ROW + 4


def _cut(text: str, width: float, size: int = 11) -> str:
    """The end of a name tells more than its middle: seeds and values stand there."""
    longest = int(width / (LETTER * size))
    kept = longest - 1
    return text if len(text) <= longest else f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _numbers(values: Sequence[float], name: str) -> list[str]:
    """The marks of an axis, with as many digits as tell them apart."""
    size, unit = 1, ""
    if name.endswith("_bytes"):
        size, unit = next(((size, f" {prefix}B") for size, prefix in PREFIXES if max(values) >= size), (1, " B"))
    for digits in (3, 4, 5, 6):
        texts = [_short(value / size, digits) + unit for value in values]
        if len(set(texts)) == len(values):
            break
    return texts


def _short(value: float, digits: int) -> str:
    """0.0312, 1023, 1.2e6: no more than nine letters with three digits."""
    if 1000 <= abs(value) < 10000:
        return f"{value:.0f}" if digits == 3 else f"{value:.{digits - 3}f}"
    mantissa, e, exponent = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def _text(
    x: float, y: float, text: str, size: int = 11, weight: str = "normal", anchor: str = "start", hint: str = ""
) -> str:
    """Args: hint: the whole of it, shown under the pointer, where `text` was cut."""
    whole = f"<title>{escape(hint)}</title>" if hint and hint != text else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="#222" '
        f'text-anchor="{anchor}">{escape(text)}{whole}</text>'
    )
