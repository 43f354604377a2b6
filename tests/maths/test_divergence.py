import math

import mlx.core as mx
import pytest

from mlxrl_runs.maths.divergence import (
    absolute,
    adapted_coefficient,
    estimate,
    k1,
    k2,
    k3,
    k3_times_ratio,
    sequence_k1,
    with_k2_gradient,
)


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


@pytest.mark.parametrize(
    ("name", "gradient", "value", "slope"),
    [
        # d = 1, r = e^.5 = 1.648721; k1 = 1, k2 = .5, k3 = .367879 with slopes 1, 1, .632121
        ("k1", "plain", 1.0, 1.0),
        ("k2", "plain", 0.5, 1.0),
        ("k3", "plain", 0.367879, 0.632121),
        ("k1", "k2", 1.0, 1.0),
        ("k2", "k2", 0.5, 1.0),
        ("k3", "k2", 0.367879, 1.0),
        ("k1", "corrected", 1.648721, 3.297443),  # r (1 + 1)
        ("k2", "corrected", 0.824361, 2.473082),  # r (.5 + 1)
        ("k3", "corrected", 0.606531, 1.648721),  # r (.367879 + .632121)
    ],
)
def test_an_estimate_has_the_value_and_the_gradient_asked_for(name, gradient, value, slope):
    old = mx.array([[-1.5]])
    got = value_and_slope(lambda logp, reference: estimate(name, gradient, logp, reference, old), -1.0, -2.0)
    assert got == pytest.approx((value, slope), abs=1e-5)


def test_an_estimate_can_be_corrected_by_the_ratio_of_another_level():
    # r = 2 logp^2 at logp -1: 2, slope -4; k1 = 1 with slope 1: value 2, slope -4 * 1 + 2 * 1
    def corrected(logp, reference):
        return estimate("k1", "corrected", logp, reference, mx.array([[-1.5]]), ratio=2 * mx.square(logp))

    assert value_and_slope(corrected, -1.0, -2.0) == pytest.approx((2.0, -2.0), abs=1e-6)


def test_an_unknown_estimate_is_refused():
    ones = mx.ones((1, 1))
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        estimate("k4", "plain", ones, ones, ones)
    with pytest.raises(ValueError, match="plain, corrected or k2"):
        estimate("k3", "k3", ones, ones, ones)


def test_the_coefficient_grows_while_the_kl_is_above_its_target_and_shrinks_below():
    # observed 6.6, target 6: +.1 * 50 / 100 -> .2 * 1.05; observed 5.4: .2 * .95
    assert adapted_coefficient(0.2, 6.6, 6.0, 50, 100) == pytest.approx(0.21)
    assert adapted_coefficient(0.2, 5.4, 6.0, 50, 100) == pytest.approx(0.19)
    assert adapted_coefficient(0.2, 6.0, 6.0, 50, 100) == 0.2


def test_the_coefficient_moves_by_at_most_a_fifth_a_horizon_and_stays_positive():
    # +-.2 * 100 / 100; with ten horizons at once 1 - 2 would turn it negative
    assert adapted_coefficient(0.2, 600.0, 6.0, 100, 100) == pytest.approx(0.24)
    assert adapted_coefficient(0.2, 0.0, 6.0, 100, 100) == pytest.approx(0.16)
    assert adapted_coefficient(0.2, 0.0, 6.0, 1000, 100) == 0.0
