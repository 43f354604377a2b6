import pytest

from mlxrl_runs.maths.shaping import overlong_penalty


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    # limit 100, buffer 20: nothing up to 80, then -1/20 a token, -1 at 100 and beyond
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (500, -1.0)],
)
def test_a_completion_pays_for_using_up_its_room(tokens, penalty):
    assert overlong_penalty(tokens, 100, 20) == pytest.approx(penalty)


def test_without_a_buffer_only_the_limit_counts():
    assert overlong_penalty(100, 100, 0) == 0.0
    assert overlong_penalty(101, 100, 0) == -1.0
