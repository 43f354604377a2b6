import mlx.core as mx
import pytest

from mlxrl_runs.maths.returns import carried_back, discounted_returns, token_returns


def test_a_return_counts_what_comes_later_discounted_once_a_turn():
    # 1 + .5 (0 + .5 * 4) = 2;  0 + .5 * 4 = 2;  4
    assert discounted_returns([1, 0, 4], 0.5) == [2.0, 2.0, 4.0]


def test_without_discount_the_first_return_is_the_whole_episode():
    assert discounted_returns([1, -2, 4], 1.0)[0] == 3.0
    assert discounted_returns([], 1.0) == []


def test_a_token_the_policy_did_not_write_is_crossed_without_discount():
    # tokens a o a with reward 8 on the last: 8, then .5 * 8 = 4 for the first although two places lie between
    got = token_returns(mx.array([[0.0, 0.0, 8.0]]), mx.array([[1, 0, 1]]), 0.5)
    assert got.tolist() == [[4.0, 0.0, 8.0]]


def test_a_reward_off_the_mask_is_not_counted():
    got = token_returns(mx.array([[1.0, 5.0, float("nan")]]), mx.array([[1, 0, 0]]), 0.5)
    assert got.tolist() == [[1.0, 0.0, 0.0]]


def test_an_undiscounted_token_return_is_the_rewards_still_to_come():
    got = token_returns(mx.array([[1.0, 2.0, 3.0], [0.0, 0.0, -1.0]]), mx.ones((2, 3)), 1.0)
    assert got.tolist() == [[6.0, 5.0, 3.0], [-1.0, -1.0, -1.0]]


@pytest.mark.parametrize("gamma", [0.5, 0.95])
def test_one_token_a_turn_is_the_return_per_turn(gamma):
    rewards = [0.25, -1.0, 0.5, 2.0]
    got = token_returns(mx.array([rewards]), mx.ones((1, 4)), gamma).tolist()[0]
    assert got == pytest.approx(discounted_returns(rewards, gamma), abs=1e-6)


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 9])
def test_what_is_carried_back_is_the_recurrence_column_by_column(columns):
    values = [float(column * column - 5) for column in range(columns)]
    decay = [0.5, 1.0, 0.0, 0.9, 0.25, 1.0, 0.5, 0.75, 0.1][:columns]
    expected, running = [0.0] * columns, 0.0
    for column in reversed(range(columns)):
        expected[column] = running = values[column] + decay[column] * running
    assert carried_back(mx.array([values]), mx.array([decay])).tolist()[0] == pytest.approx(expected, rel=1e-6)
