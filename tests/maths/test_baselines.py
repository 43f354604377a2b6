import math

import pytest

from mlxrl_runs.maths.baselines import (
    clip_returns,
    combine_rewards,
    group_advantage,
    keep_mixed_groups,
    leave_one_out,
    leave_one_out_normalized,
    normalize_over_batch,
    normalize_then_sum,
    penalized_returns,
    sample_std,
)

NAN = math.nan


def test_h01_a_group_of_one_has_advantage_zero_and_never_its_raw_reward():
    for scaling in ("group", "batch", "none"):
        assert group_advantage([1.0], ["a"], scaling) == [0.0]
        assert group_advantage([1.0, 5.0], ["a", "b"], scaling) == [0.0, 0.0]
    assert leave_one_out([1.0], ["a"]) == [0.0]


def test_h02_a_group_is_centred_and_scaled_by_itself():
    # each pair: mean .5 or 10.5, sample std sqrt(.5) = .70711 -> +-.5 / .70711 = +-.70711; over the whole batch instead
    # the second pair would be at about +.9
    got = group_advantage([1, 0, 11, 10], ["a", "a", "b", "b"], "group", eps=0.0)
    assert got == pytest.approx([0.70711, -0.70711, 0.70711, -0.70711], abs=1e-5)


def test_h02_membership_follows_the_group_id_and_not_the_position():
    got = group_advantage([1, 11, 0, 10], ["a", "b", "a", "b"], "group", eps=0.0)
    assert got == pytest.approx([0.70711, 0.70711, -0.70711, -0.70711], abs=1e-5)
    assert leave_one_out([1, 11, 0, 10], [7, 3, 7, 3]) == [1.0, 1.0, -1.0, -1.0]


def test_eps_is_added_to_the_std_outside_the_root():
    # std of (0, 2) is sqrt 2 = 1.41421; 1 / (1.41421 + .5) = .52241; inside the root it would be 1 / sqrt(2.5) = .63246
    assert group_advantage([2, 0], [0, 0], "group", eps=0.5)[0] == pytest.approx(0.52241, abs=1e-5)


def test_none_only_centres():
    assert group_advantage([4, 1, 1], [0, 0, 0], "none", eps=0.5) == [2.0, -1.0, -1.0]


def test_batch_divides_by_the_spread_of_all_returns():
    # all of 0, 2, 4, 6: mean 3, squares 9 + 1 + 1 + 9 = 20, std sqrt(20 / 3) = 2.58199; +-1 / 2.58199 = +-.38730
    got = group_advantage([0, 2, 4, 6], ["a", "a", "b", "b"], "batch", eps=0.0)
    assert got == pytest.approx([-0.38730, 0.38730, -0.38730, 0.38730], abs=1e-5)


def test_equal_returns_give_exactly_zero_whatever_the_rounding_of_their_mean():
    # the plain mean of three times 0.1 is 0.10000000000000002
    assert (0.1 + 0.1 + 0.1) / 3 != 0.1
    for scaling in ("group", "batch", "none"):
        assert group_advantage([0.1] * 3 + [1.0, 0.0], [0, 0, 0, 1, 1], scaling, eps=1e-30)[:3] == [0.0] * 3
    assert leave_one_out([0.1] * 3, [0] * 3) == [0.0] * 3
    assert normalize_over_batch([0.1] * 3, eps=1e-30) == [0.0] * 3


def test_an_unscored_row_gets_zero_and_leaves_its_group_alone():
    assert group_advantage([3, NAN, 1], [0, 0, 0], "none") == [1.0, 0.0, -1.0]
    assert leave_one_out([3, NAN, 1], [0, 0, 0]) == [2.0, 0.0, -2.0]


def test_an_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match="group, batch or none"):
        group_advantage([1, 0], [0, 0], "std")


def test_leave_one_out_subtracts_the_mean_of_the_others():
    # 6 - (2 + 1) / 2 = 4.5;  2 - (6 + 1) / 2 = -1.5;  1 - (6 + 2) / 2 = -3
    assert leave_one_out([6, 2, 1], [0, 0, 0]) == [4.5, -1.5, -3.0]


def test_normalised_leave_one_out_counts_only_rows_with_scored_siblings():
    # row 2 is unscored and row 3 alone: only +-2 remain, mean 0, std sqrt 8 = 2.82843 -> +-.70711
    got = leave_one_out_normalized([3, 1, NAN, 9], ["a", "a", "a", "b"], eps=0.0)
    assert got == pytest.approx([0.70711, -0.70711, 0, 0], abs=1e-5)


def test_a_missing_reward_is_skipped_and_a_row_without_any_is_unscored():
    got = combine_rewards([[1, 2], [NAN, 2], [NAN, NAN]], [1, 0.5])
    assert got[:2] == [2.0, 1.0] and math.isnan(got[2])


def test_normalising_first_lets_a_small_function_weigh_as_much_as_a_large_one():
    # both functions have +-.70711 in each group and cancel: 0 everywhere; the plain sum would follow the large one
    rewards = [[100, 0], [0, 1], [0, 1], [100, 0]]
    assert normalize_then_sum(rewards, [1, 1], [0, 0, 1, 1], eps=0.0) == pytest.approx([0, 0, 0, 0], abs=1e-12)
    # with weights 1 and 0 the large one alone: +-.70711, then over the batch of four, std .81650, +-.86603
    got = normalize_then_sum(rewards, [1, 0], [0, 0, 1, 1], eps=0.0)
    assert got == pytest.approx([0.86603, -0.86603, -0.86603, 0.86603], abs=1e-5)


def test_normalising_first_leaves_a_row_without_any_reward_out_of_the_batch():
    # +-.70711 in the scored group; over those two the std is 1 (with two zeros more it would be .57735)
    got = normalize_then_sum([[2], [0], [NAN], [NAN]], [1], [0, 0, 1, 1], eps=0.0)
    assert got == pytest.approx([0.70711, -0.70711, 0, 0], abs=1e-5)


def test_clipped_returns_keep_the_unscored():
    got = clip_returns([-3, 0.5, 3, NAN], -1, 2)
    assert got[:3] == [-1, 0.5, 2] and math.isnan(got[3])


def test_kl_is_paid_from_the_return():
    assert penalized_returns([1.0, 1.0], [2.0, -2.0], 0.1) == [0.8, 1.2]


def test_only_groups_with_two_different_returns_are_kept():
    # group a: equal; b: mixed, not adjacent; c: one row; d: its only difference is a row nobody scored
    returns = [1, 0, 1, 1, 0.5, 2, NAN]
    assert keep_mixed_groups(returns, ["a", "b", "a", "b", "c", "d", "d"]) == [1, 3]


def test_the_std_is_that_of_a_sample():
    # (1, 3): squares 1 + 1, over n - 1 = 1 -> sqrt 2; over n it would be 1
    assert sample_std([1, 3]) == pytest.approx(1.41421, abs=1e-5)
    assert sample_std([5]) == 0.0
