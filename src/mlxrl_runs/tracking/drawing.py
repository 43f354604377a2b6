"""Small pictures and readable numbers made of text."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

EIGHTHS = " ▁▂▃▄▅▆▇█"
ASCII_LEVELS = " .:-=+*#"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """One line of at most `width` characters, the lowest value at the bottom and the highest at the top."""
    columns = resample(values, min(width, len(values)))
    if not columns:
        return ""
    levels = (ASCII_LEVELS if ascii_only else EIGHTHS)[1:]
    low, high = min(columns), max(columns)
    top = len(levels) - 1
    return "".join(levels[round((value - low) / (high - low) * top) if high > low else 0] for value in columns)


def area_chart(values: Sequence[float], width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    """`height` lines, the first on top, that fill the area under a curve.

    The bottom is 0, or the lowest value where that is negative, and the top is the highest; both stand on the left.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return []
    low, high = min(0.0, min(finite)), max(finite)
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    margin = max(len(label) for label in labels.values())
    steps = 1 if ascii_only else 8
    filled = [
        round((value - low) / (high - low) * height * steps) if high > low else 0 for value in resample(values, width)
    ]
    edge = "|" if ascii_only else "┤"
    lines = []
    for line in range(height):
        below = (height - 1 - line) * steps
        cells = "".join(_cell(level - below, ascii_only) for level in filled)
        lines.append(f"{labels.get(line, ''):>{margin}} {edge}{cells}".rstrip())
    return lines


def _cell(level: int, ascii_only: bool) -> str:
    if ascii_only:
        return "#" if level > 0 else " "
    return EIGHTHS[min(max(level, 0), 8)]


def resample(values: Sequence[float], width: int) -> list[float]:
    """`width` numbers that follow `values`: means where there are more values than columns, repeats where fewer.

    Values that are not finite are left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return []
    bounds = [number * len(finite) / width for number in range(width + 1)]
    parts = [finite[int(start) : max(int(end), int(start) + 1)] for start, end in itertools.pairwise(bounds)]
    return [sum(part) / len(part) for part in parts]


def readable_bytes(count: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def readable_seconds(seconds: float) -> str:
    """75 -> 1:15; 3675 -> 1:01:15."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def printable(text: str, width: int) -> str:
    """A text of unknown origin on one line of at most `width` characters, without anything a terminal would obey."""
    flat = "".join(letter if letter.isprintable() else " " for letter in text.strip())
    return flat if len(flat) <= width else flat[: max(width - 3, 0)] + "..."


def readable_path(path: str) -> str:
    """A path as a person would type it here: relative where it lies under the working directory."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path
