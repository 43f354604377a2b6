"""Curves, read back from the SVG they were written to."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from mlxrl_runs.report.curves import COLUMNS, LEFT, LETTER, PANEL_WIDTH, draw_curves

SVG = "{http://www.w3.org/2000/svg}"


def rows(*values, name="reward/mean"):
    return [{"step": step, name: value} for step, value in enumerate(values)]


def drawn(runs, *names, title="a run"):
    return ElementTree.fromstring(draw_curves(runs, names, title).svg)


def texts(root):
    return [node.text for node in root.iter(f"{SVG}text")]


def lines(root):
    return [
        [tuple(map(float, point.split(","))) for point in node.get("points").split()]
        for node in root.iter(f"{SVG}polyline")
    ]


def test_a_panel_goes_from_the_lowest_to_the_highest_value_and_from_the_first_to_the_last_step():
    # 320 wide: the plot from 56 to 308; 190 high: from 30 down to 164
    [line] = lines(drawn({"": rows(0.0, 1.0, 0.25)}, "reward/mean"))
    assert line == [(56, 164), (182, 30), (308, 130.5)]
    assert texts(drawn({"": rows(0.0, 1.0, 0.25)}, "reward/mean")) == [
        "a run",
        "reward/mean",
        "0",
        "0.5",
        "1",
        "0",
        "2",
    ]


def test_a_metric_that_is_absent_or_null_is_left_out_and_one_nobody_has_gets_no_panel():
    gaps = [*rows(1.0, None), {"step": 2}, {"step": 3, "reward/mean": 2.0}]
    root = drawn({"": gaps}, "reward/mean", "kl/old")
    assert [len(line) for line in lines(root)] == [2]
    assert "kl/old" not in texts(root) and root.get("width") == str(PANEL_WIDTH)
    with pytest.raises(ValueError, match=r"none of kl/old, kl/new was logged"):
        draw_curves({"": gaps}, ("kl/old", "kl/new"), "a run")


def test_panels_fill_rows_of_three():
    names = ["a/a", "b/b", "c/c", "d/d"]
    root = drawn({"": [{"step": step, **dict.fromkeys(names, step)} for step in (0, 1)]}, *names)
    placed = [group.get("transform") for group in root.iter(f"{SVG}g")]
    assert COLUMNS == 3 and placed == [f"translate({x},{y})" for x, y in ((0, 30), (320, 30), (640, 30), (0, 220))]


def test_one_run_has_no_legend_and_several_have_one_colour_each():
    assert not [text for text in texts(drawn({"seed=0": rows(0, 1)}, "reward/mean")) if text == "seed=0"]
    root = drawn({"seed=0": rows(0, 1), "seed=1": rows(1, 2)}, "reward/mean")
    assert {"seed=0", "seed=1"} <= set(texts(root))
    keys = [node.get("fill") for node in root.iter(f"{SVG}rect") if node.get("height") == "4"]
    assert keys == [node.get("stroke") for node in root.iter(f"{SVG}polyline")] and len(set(keys)) == 2


@pytest.mark.parametrize("count", [2, 8, 20])
def test_no_legend_and_no_title_is_cut_off_at_the_edge_or_runs_into_another(count):
    labels = [f"algorithm=gigpo optimizer.learning_rate={number / 1000} seed={number}" for number in range(count)]
    root = drawn({label: rows(0, 1) for label in labels}, "reward/mean", "reward/mean", title="name " * 40)
    width = float(root.get("width"))
    spans = []
    for node in root.findall(f"{SVG}text"):
        start, size = float(node.get("x")), float(node.get("font-size"))
        spans.append((float(node.get("y")), start, start + LETTER * size * len(node.text)))
    assert len(spans) == count + 1 and max(end for _, _, end in spans) <= width
    for (row, _, end), (next_row, start, _) in pairwise(spans):
        assert next_row > row or start > end
    panel = min(float(group.get("transform").split(",")[1][:-1]) for group in root.iter(f"{SVG}g"))
    assert max(row for row, _, _ in spans) < panel


def test_a_label_that_is_too_long_keeps_both_ends_and_is_whole_under_the_pointer():
    label = "algorithm=gigpo " + "x" * 80 + " seed=3"
    root = drawn({label: rows(0, 1), "b": rows(0, 1)}, "reward/mean")
    [shown] = [text for text in texts(root) if text.startswith("algorithm")]
    assert shown.endswith("seed=3") and "…" in shown and len(shown) < 40
    assert [node.text for node in root.iter(f"{SVG}title")] == [label]


def test_labels_and_titles_cannot_break_out_of_the_drawing():
    evil = '<script>alert("1")</script>&"'
    svg = draw_curves({evil: rows(0, 1), "b": rows(0, 1)}, ("reward/mean",), evil).svg
    assert "<script" not in svg
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == evil and evil in [node.text for node in root.iter(f"{SVG}title")]


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("memory/peak_bytes", (0, 3 * 2**30), ["0 GiB", "1.5 GiB", "3 GiB"]),
        ("memory/peak_bytes", (70 * 2**20, 80 * 2**20), ["70 MiB", "75 MiB", "80 MiB"]),
        ("memory/peak_bytes", (0, 1000), ["0 B", "500 B", "1000 B"]),
        ("memory/peak_bytes", (1000 * 2**20, 1020 * 2**20), ["1000 MiB", "1010 MiB", "1020 MiB"]),
        ("grad/norm", (0, 1.25e7), ["0", "6.25e6", "1.25e7"]),
        ("grad/norm", (-2e-5, 0), ["-2e-5", "-1e-5", "0"]),
        ("grad/norm", (1000.1, 1000.3), ["1000.1", "1000.2", "1000.3"]),  # told apart
        ("grad/norm", (0.98, 0.981), ["0.98", "0.9805", "0.981"]),
        ("grad/norm", (2.0, 2.0), ["1.5", "2", "2.5"]),  # a flat line lies in the middle
    ],
)
def test_the_marks_of_an_axis_are_short_and_differ(name, values, shown):
    found = texts(drawn({"": rows(*values, name=name)}, name))[2:5]
    assert found == shown
    assert all(LETTER * 11 * len(text) <= LEFT - 1 for text in found)


def test_few_points_are_dots_too_and_many_are_a_line_alone():
    dots = lambda count: len(re.findall("<circle", draw_curves({"": rows(*range(count))}, ("reward/mean",), "t").svg))
    assert (dots(1), dots(11), dots(12)) == (1, 11, 0)
