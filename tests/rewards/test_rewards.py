"""Each kind of reward part, worked by hand."""

import time

import pytest

from building import settings
from mlxrl_runs.core.protocols import Completion, StepResult
from mlxrl_runs.rewards.numeric import numbers_in


def completion(text, answer=None, tokens=3, truncated=False, paid=0.0, success=0.0):
    result = StepResult("", paid, True, {"success": success})
    return Completion(text, "2+2", "t", answer, tokens, 10, truncated, result)


def value(kind, given, is_right=False, **changes):
    return settings("reward", kind, **changes).value(given, is_right)


def test_numbers_are_read_with_their_sign_and_their_commas():
    assert numbers_in("12 - 5 is -7, not 1,204.5") == [12, 5, -7, 1204.5]
    assert numbers_in("12-5") == [12, 5]  # a minus behind a digit subtracts
    assert numbers_in("(−3)") == [-3]
    assert numbers_in("x-4 no2") == [4, 2] and numbers_in("none") == []


@pytest.mark.parametrize(
    ("text", "which", "paid"),
    [
        ("It is 46", "last", 1),
        ("46 or 47", "last", 0),
        ("46 or 47", "first", 1),
        ("forty", "last", 0),
        ("046", "last", 1),
    ],
)
def test_numeric_pays_for_the_number_it_was_told_to_look_at(text, which, paid):
    assert value("numeric", completion(text, "46"), which=which) == paid


def test_numeric_runs_no_text():
    assert value("numeric", completion("23*2 40+6", "46")) == 0


def test_exact_is_the_answer_alone():
    assert value("exact", completion(" Paris\n", "Paris")) == 1
    assert value("exact", completion("It is Paris", "Paris")) == 0
    assert value("exact", completion("paris", "Paris")) == 0
    assert value("exact", completion("paris", "Paris"), ignore_case=True) == 1


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        ("<think>a\nb</think> <solution>4</solution>\n", 1),
        ("<solution>4</solution><think></think>", 0),
        ("<think></think><solution>4</solution>!", 0),
        ("<think></think><solution>4</solution><solution>5</solution>", 0),
    ],
)
def test_format_wants_each_tag_once_in_order_and_nothing_else(text, paid):
    assert value("format", completion(text)) == paid


def test_regex_pays_for_fitting_and_compares_what_it_caught_with_the_answer():
    tags = r"<solution>(?P<answer>.*)</solution>"
    assert value("regex", completion("say 4 now"), pattern=r"\d") == 1
    assert value("regex", completion("say 4 now"), pattern=r"\d", whole=True) == 0
    assert value("regex", completion("so <solution> 4 </solution>", "4"), pattern=tags) == 1
    assert value("regex", completion("so <solution>5</solution>", "4"), pattern=tags) == 0
    assert settings("reward", "regex", pattern=tags).judges and not settings("reward", "regex", pattern="a").judges


@pytest.mark.parametrize(
    "piece", ["<think>", "</think><solution>", "1,", "-", "9", "  ", "<think></think> <solution>1"]
)
def test_a_long_hostile_text_is_judged_at_once(piece):
    # every kind that reads text, on 200 kB of it; a pattern whose parts overlap takes 5 s for the second piece
    text, started = "<think>" + piece * (200_000 // len(piece)), time.perf_counter()
    for kind in ("numeric", "exact", "format"):
        value(kind, completion(text, "4"))
    for form in ("tags", "number"):
        settings("env", "arithmetic", answers=form).make("2+2", 0, 0).step(text)
    assert time.perf_counter() - started < 2


def test_length_costs_the_share_used_and_by_default_only_right_answers():
    assert value("length", completion("x", tokens=3), is_right=True) == -0.3
    assert value("length", completion("x", tokens=3), is_right=False) == 0
    assert value("length", completion("x", tokens=3), of="every") == -0.3


def test_truncated_costs_one():
    assert value("truncated", completion("x", truncated=True)) == -1
    assert value("truncated", completion("x")) == 0


def test_a_file_brings_a_function_of_the_users_own(tmp_path):
    (tmp_path / "mine.py").write_text("def shout(completion):\n    return completion.text.isupper()\n")
    part = settings("reward", "file", path=str(tmp_path / "mine.py"), function="shout")
    assert part.value(completion("HI"), False) == 1 and part.value(completion("Hi"), False) == 0
