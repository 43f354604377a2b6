from mlxrl_runs.tracking.drawing import area_chart, printable, readable_bytes, readable_seconds, resample, sparkline


def test_a_sparkline_rises_from_the_lowest_to_the_highest_value():
    # levels (v - 2) / (9 - 2) * 7 = 0, 1, 3, 7 of the eight blocks
    assert sparkline([2, 3, 5, 9], 10) == "▁▂▄█"
    assert sparkline([9, 2], 10) == "█▁"
    # six levels over four values: 0, 1 * 6/7 -> 1, 3 * 6/7 -> 3, 6
    assert sparkline([2, 3, 5, 9], 10, ascii_only=True) == ".:=#"


def test_a_sparkline_of_equal_values_is_flat_and_of_none_is_empty():
    assert sparkline([4, 4, 4], 10) == "▁▁▁"
    assert sparkline([], 10) == "" and sparkline([float("nan")], 10) == ""


def test_more_values_than_columns_are_averaged_and_fewer_repeated():
    assert resample([1, 3, 5, 7], 2) == [2, 6]
    assert resample([1, 5], 4) == [1, 1, 5, 5]
    assert resample([1, float("nan"), 5], 2) == [1, 5]


def test_an_area_reaches_as_high_as_its_value():
    # 2 lines of 8 levels: 0 -> 0, 0.25 -> 4 of 16, 0.75 -> 12 = one full cell and half of the next, 1 -> 16
    assert area_chart([0, 0.25, 0.75, 1], 4, 2) == ["1.00 ┤  ▄█", "0.00 ┤ ▄██"]
    # without blocks a cell is there or not: 0.25 * 2 = 0.5 rounds to 0 cells, 0.75 * 2 = 1.5 to 2
    assert area_chart([0, 0.25, 0.75, 1], 4, 2, ascii_only=True) == ["1.00 |  ##", "0.00 |  ##"]


def test_a_negative_reward_lowers_the_floor():
    assert area_chart([-1, 1], 2, 2) == [" 1.00 ┤ █", "-1.00 ┤ █"]


def test_a_chart_of_nothing_is_nothing():
    assert area_chart([], 10, 3) == [] and area_chart([float("inf")], 10, 3) == []


def test_bytes_and_seconds_are_readable():
    assert [readable_bytes(count) for count in (0, 1023, 1536, 200 * 1024**2, 3 * 1024**3)] == [
        "0 B", "1023 B", "1.5 KiB", "200 MiB", "3.00 GiB",
    ]  # fmt: skip
    assert [readable_seconds(seconds) for seconds in (0.4, 75, 3675)] == ["0:00", "1:15", "1:01:15"]


def test_a_text_of_unknown_origin_cannot_command_the_terminal():
    assert printable("a\x1b[2Jb\nc", 20) == "a [2Jb c"
    assert printable("abcdefgh", 6) == "abc..."
