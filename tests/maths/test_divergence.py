import math

import mlx.core as mx
import pytest

from mlxrl_runs.maths.divergence import absolute, k1, k2, k3, k3_times_ratio, sequence_k1, with_k2_gradient


def value_and_slope(estimator, logp: float, reference_logp: float) -> tuple[float, float]:
    reference = mx.array([[reference_logp]])
    value, slope = mx.value_and_grad(lambda x: estimator(x, reference).sum())(mx.array([[logp]]))
    return value.item(), slope.item()


def test_a_token_likelier_than_the_reference_has_it_pulled_down_by_k3():
    # logp -1, reference -2, d = 1: e^-1 + 1 - 1 = .36788 (swapped: e - 2 = .71828); slope 1 - e^-1 = +.63212, so a
    # descent step lowers logp
    assert value_and_slope(k3, -1.0, -2.0) == pytest.approx((0.36788, 0.63212), abs=1e-5)


def test_where_policy_and_reference_agree_every_estimator_is_zero():
    for estimator in (k1, k2, k3, absolute):
        assert value_and_slope(estimator, -1.5, -1.5)[0] == 0
    assert value_and_slope(k3, -1.5, -1.5)[1] == 0


def test_k3_is_never_negative_not_even_by_rounding():
    # exp(x) - x - 1 in float32 reaches -6e-8 on these
    distance = mx.concatenate([mx.linspace(-width, width, 20001) for width in (1e-6, 1e-4, 1e-2, 1.0, 19.0)])
    assert k3(mx.zeros_like(distance), distance).min().item() >= 0


def test_k3_keeps_its_digits_for_small_differences():
    # d = .001: d^2 / 2 - d^3 / 6 = 4.998334e-7; exp(x) - x - 1 would be off in the second digit
    assert value_and_slope(k3, 0.001, 0.0)[0] == pytest.approx(4.998334e-7, rel=1e-3)


def test_k1_k2_and_abs_have_their_own_values_and_slopes():
    # d = -3
    assert value_and_slope(k1, -4.0, -1.0) == (-3.0, 1.0)
    assert value_and_slope(k2, -4.0, -1.0) == (4.5, -3.0)
    assert value_and_slope(absolute, -4.0, -1.0) == (3.0, -1.0)


def test_clamps_bound_k3_and_end_its_slope():
    # reference - logp = 30: at the log-ratio clamp 20, e^20 - 21; at the value clamp 10
    assert value_and_slope(k3, -31.0, -1.0) == pytest.approx((485165174.4, 0.0), rel=1e-5)
    clamped = lambda logp, reference: k3(logp, reference, 20.0, 10.0)
    assert value_and_slope(clamped, -31.0, -1.0) == (10.0, 0.0)
    # within both: d = 1
    assert value_and_slope(clamped, -1.0, -2.0) == pytest.approx((0.36788, 0.63212), abs=1e-5)


def test_the_plus_form_has_the_value_of_one_and_the_slope_of_k2():
    plus = lambda logp, reference: with_k2_gradient(k3(logp, reference), logp, reference)
    assert value_and_slope(plus, -1.0, -2.0) == pytest.approx((0.36788, 1.0), abs=1e-5)


def test_times_ratio_carries_the_gradient_through_both_factors():
    # d = 1, r = e^.5 = 1.64872: r k3 = .60653; slope r (k3 + 1 - e^-1) = 1.64872 * 1 = 1.64872
    old = mx.array([[-1.5]])
    got = value_and_slope(lambda logp, reference: k3_times_ratio(logp, reference, old), -1.0, -2.0)
    assert got == pytest.approx((0.60653, 1.64872), abs=1e-5)


def test_the_log_ratio_of_a_row_counts_action_tokens_only():
    logp = mx.array([[-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0]])
    got = sequence_k1(logp, mx.full((2, 3), -3.0), mx.array([[1, 1, 0], [0, 0, 1]]))
    assert got.tolist() == [3.0, 2.0]
