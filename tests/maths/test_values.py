import math

import mlx.core as mx
import pytest

from mlxrl_runs.maths.returns import token_returns
from mlxrl_runs.maths.values import clipped_value_loss, explained_variance, gae, value_clip_fraction

# Actions in columns 0, 1 and 3; column 2 is the environment's and holds what must not be read.
MASK = mx.array([[1, 1, 0, 1]])
REWARDS = mx.array([[0.0, 1.0, math.nan, 4.0]])
VALUES = mx.array([[2.0, 1.0, math.inf, 3.0]])


def test_an_advantage_adds_up_the_surprises_still_to_come():
    # gamma .5, lambda .5: delta = 0 + .5 * 1 - 2 = -1.5 | 1 + .5 * 3 - 1 = 1.5 | 4 - 3 = 1
    # A = 1 | 1.5 + .25 * 1 = 1.75 | -1.5 + .25 * 1.75 = -1.0625, the hole crossed without discount
    advantage, returns = gae(REWARDS, VALUES, MASK, 0.5, 0.5)
    assert advantage.tolist() == [[-1.0625, 1.75, 0.0, 1.0]]
    assert returns.tolist() == [[0.9375, 2.75, 0.0, 4.0]]


def test_lambda_zero_is_the_surprise_of_one_step():
    assert gae(REWARDS, VALUES, MASK, 0.5, 0.0)[0].tolist() == [[-1.5, 1.5, 0.0, 1.0]]


@pytest.mark.parametrize("gamma", [1.0, 0.75])
def test_lambda_one_is_the_return_minus_the_value(gamma):
    advantage, returns = gae(REWARDS, VALUES, MASK, gamma, 1.0)
    expected = token_returns(REWARDS, MASK, gamma)
    assert returns.tolist()[0] == pytest.approx(expected.tolist()[0], abs=1e-6)
    assert advantage.tolist()[0] == pytest.approx(mx.where(MASK != 0, expected - VALUES, 0.0).tolist()[0], abs=1e-6)


def test_an_episode_that_was_cut_off_counts_the_value_of_what_comes_next():
    # two rows that end on column 1: delta = 4 + .5 * b - 3, b = 0 and 6
    rewards, values = mx.array([[0.0, 4.0, 9.0]] * 2), mx.array([[1.0, 3.0, 9.0]] * 2)
    advantage, returns = gae(rewards, values, mx.array([[1, 1, 0]] * 2), 0.5, 0.5, mx.array([0.0, 6.0]))
    # A_1 = 1 and 4; delta_0 = .5 * 3 - 1 = .5, A_0 = .5 + .25 * A_1
    assert advantage.tolist() == [[0.75, 1.0, 0.0], [1.5, 4.0, 0.0]]
    assert returns.tolist() == [[1.75, 4.0, 0.0], [2.5, 7.0, 0.0]]


def test_a_row_without_actions_has_no_advantage_not_even_a_bootstrapped_one():
    advantage, returns = gae(REWARDS, VALUES, mx.zeros((1, 4)), 0.5, 0.5, mx.array([7.0]))
    assert advantage.tolist() == returns.tolist() == [[0.0] * 4]


def value_loss_at(value: float, clip: float | None) -> tuple[float, float]:
    """Value and slope at old value 1 and return 3."""
    loss = lambda values: clipped_value_loss(values, mx.array([[1.0]]), mx.array([[3.0]]), clip).sum()
    value_, slope = mx.value_and_grad(loss)(mx.array([[value]]))
    return value_.item(), slope.item()


def test_a_value_that_moved_toward_the_return_stops_being_paid_beyond_the_clip():
    # V = 2, held at 1.5: max(1, 2.25) / 2, slope 0; without a clip 1 / 2, slope V - R = -1
    assert value_loss_at(2.0, 0.5) == (1.125, 0.0)
    assert value_loss_at(2.0, None) == (0.5, -1.0)


def test_a_value_that_moved_away_is_never_clipped():
    # V = 0, held at .5: max(9, 6.25) / 2, slope -3
    assert value_loss_at(0.0, 0.5) == (4.5, -3.0)


@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_at_the_old_value_the_gradient_flows_whatever_the_clip(clip):
    # V = 1: 4 / 2, slope -2
    assert value_loss_at(1.0, clip) == (2.0, -2.0)


@pytest.mark.parametrize("value", [2.0, 0.0])  # beyond the clip, and where the plain error counts
def test_old_values_and_returns_are_constants(value):
    old_values, returns = mx.array([[1.0]]), mx.array([[3.0]])
    slopes = mx.grad(lambda *arrays: clipped_value_loss(mx.array([[value]]), *arrays, 0.5).sum(), argnums=(0, 1))
    assert [slope.item() for slope in slopes(old_values, returns)] == [0.0, 0.0]


def test_the_value_clip_fraction_marks_the_tokens_that_the_clip_silences():
    values, old, returns = mx.array([[2.0, 0.0, 1.2]]), mx.full((1, 3), 1.0), mx.full((1, 3), 3.0)
    assert value_clip_fraction(values, old, returns, 0.5).tolist() == [[1, 0, 0]]
    assert value_clip_fraction(values, old, returns, None).tolist() == [[0, 0, 0]]


def test_the_explained_variance_counts_what_the_values_leave_over():
    # returns 1, 3, 5 on the mask: squares about their mean 3 add up to 8. Values off by 0, 2, 0: 1 - 4 / 8
    returns, mask = mx.array([[1.0, math.nan, 3.0, 5.0]]), mx.array([[1, 0, 1, 1]])
    explained = lambda values: explained_variance(mx.array([values]), returns, mask)
    assert explained([1.0, 9.0, 5.0, 5.0]) == pytest.approx(0.5)
    assert explained([1.0, 9.0, 3.0, 5.0]) == 1.0
    assert explained([3.0, 9.0, 3.0, 3.0]) == 0.0
    assert explained([5.0, 9.0, 3.0, 1.0]) == pytest.approx(-3.0)  # 1 - (16 + 16) / 8


def test_equal_returns_leave_nothing_to_explain():
    assert explained_variance(mx.array([[1.0, 2.0]]), mx.array([[0.1, 0.1]]), mx.ones((1, 2))) == 0.0
