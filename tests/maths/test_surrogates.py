import math

import mlx.core as mx
import pytest

from mlxrl_runs.maths.surrogates import (
    cap_fractions,
    capped_surrogate,
    clip_fractions,
    clipped_surrogate,
    dual_clip_fraction,
    gated_surrogate,
    importance_ratio,
    ratio_at,
)


def surrogate_at(
    ratio: float, advantage: float, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> tuple[float, float]:
    """Value and slope by logp where the policy is `ratio` times as likely as the sampler."""
    return value_and_slope(
        lambda r, _: clipped_surrogate(r, mx.array([[advantage]]), clip_low, clip_high, dual_clip), ratio
    )


def value_and_slope(term, ratio: float) -> tuple[float, float]:
    """`term` is given the ratio and logp = log(ratio), old_logp being 0."""

    def loss(logp):
        return term(importance_ratio(logp, mx.zeros((1, 1))), logp).sum()

    value, slope = mx.value_and_grad(loss)(mx.log(mx.array([[ratio]])))
    return value.item(), slope.item()


def test_a_raised_probability_stops_paying_beyond_the_clip():
    # r = 1.5, A = 2, high = .2 -> -min(1.5 * 2, 1.2 * 2) = -2.4, and the slope there is 0
    assert surrogate_at(1.5, 2.0) == pytest.approx((-2.4, 0.0), abs=1e-5)


def test_a_lowered_probability_of_a_bad_action_stops_paying_beyond_the_clip():
    # r = .5, A = -2, low = .2 -> -min(-1, -1.6) = 1.6, slope 0
    assert surrogate_at(0.5, -2.0) == pytest.approx((1.6, 0.0), abs=1e-5)


def test_a_move_in_the_wrong_direction_is_never_clipped():
    # r = 1.5, A = -2 -> -min(-3, -2.4) = 3, slope -r A = 3;  r = .5, A = 2 -> -min(1, 1.6) = -1, slope -1
    assert surrogate_at(1.5, -2.0) == pytest.approx((3.0, 3.0), abs=1e-5)
    assert surrogate_at(0.5, 2.0) == pytest.approx((-1.0, -1.0), abs=1e-5)


def test_the_upper_clip_may_be_wider_than_the_lower():
    # r = 1.25 is inside 1 + .28: -1.25 with slope -1.25
    assert surrogate_at(1.25, 1.0, 0.2, 0.28) == pytest.approx((-1.25, -1.25), abs=1e-5)
    assert surrogate_at(1.25, 1.0, 0.28, 0.2) == pytest.approx((-1.2, 0.0), abs=1e-5)


@pytest.mark.parametrize("clip", [0.2, 3e-4, 0.0])
def test_at_ratio_one_the_gradient_flows_whatever_the_clip(clip):
    # r = 1, A = 3 -> value -3, slope -3
    assert surrogate_at(1.0, 3.0, clip, clip) == pytest.approx((-3.0, -3.0), abs=1e-5)


def test_old_is_a_constant_even_when_it_is_the_same_array():
    logp = mx.array([[-1.0, -2.0]])
    value, slope = mx.value_and_grad(
        lambda x: clipped_surrogate(importance_ratio(x, x), mx.array([[2.0]]), 0.2, 0.2).sum()
    )(logp)
    assert value.item() == -4.0
    assert slope.tolist() == [[-2.0, -2.0]]


def test_the_log_ratio_clamp_bounds_the_ratio_and_ends_its_slope():
    # a log-ratio of 100 overflows float32; held at 20 it is e^20 = 485165195
    value, slope = mx.value_and_grad(lambda x: importance_ratio(x, mx.zeros((1,))).sum())(mx.array([100.0]))
    assert value.item() == pytest.approx(485165195.4, rel=1e-5)
    assert slope.item() == 0
    assert importance_ratio(mx.array([100.0]), mx.zeros((1,)), None).item() == float("inf")


def test_clip_fractions_mark_the_tokens_that_the_clip_silences():
    # r = .5, .5, 1, 1.5, 1.5 with A = -, +, +, -, +: low only at the first, high only at the last
    ratio, advantage = mx.array([[0.5, 0.5, 1.0, 1.5, 1.5]]), mx.array([[-1.0, 1.0, 1.0, -1.0, 1.0]])
    low, high = clip_fractions(ratio, advantage, 0.2, 0.28)
    assert low.tolist() == [[1, 0, 0, 0, 0]]
    assert high.tolist() == [[0, 0, 0, 0, 1]]


def test_one_advantage_a_row_serves_all_its_tokens():
    got = clipped_surrogate(mx.ones((2, 3)), mx.array([[1.0], [-2.0]]), 0.2, 0.2)
    assert got.tolist() == [[-1.0] * 3, [2.0] * 3]


def test_the_dual_clip_bounds_what_a_bad_action_can_cost():
    # r = 4, A = -2: without 8, slope 8; with c = 3 -> -3 * -2 = 6, slope 0. Within c it changes nothing: r = 2 -> 4
    assert surrogate_at(4.0, -2.0) == pytest.approx((8.0, 8.0), abs=1e-5)
    assert surrogate_at(4.0, -2.0, dual_clip=3.0) == pytest.approx((6.0, 0.0), abs=1e-5)
    assert surrogate_at(2.0, -2.0, dual_clip=3.0) == pytest.approx((4.0, 4.0), abs=1e-5)


def test_the_dual_clip_leaves_good_actions_alone():
    # r = 4, A = 2 -> -1.2 * 2; r = .5, A = 2 -> -1, slope -1
    assert surrogate_at(4.0, 2.0, dual_clip=3.0) == pytest.approx((-2.4, 0.0), abs=1e-5)
    assert surrogate_at(0.5, 2.0, dual_clip=3.0) == pytest.approx((-1.0, -1.0), abs=1e-5)


def test_the_dual_clip_fraction_marks_bad_actions_beyond_it():
    ratio, advantage = mx.array([[4.0, 4.0, 2.0]]), mx.array([[-1.0, 1.0, -1.0]])
    assert dual_clip_fraction(ratio, advantage, 3.0).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(("ratio", "weight"), [(2.0, 2.0), (9.0, 5.0), (0.1, 0.5)])
def test_a_capped_ratio_weighs_the_slope_and_never_silences_it(ratio, weight):
    # floor .5, cap 5, A = -2: -w A logp = 2 w log r, slope 2 w
    got = value_and_slope(lambda r, logp: capped_surrogate(r, logp, mx.array([[-2.0]]), 0.5, 5.0), ratio)
    assert got == pytest.approx((2 * weight * math.log(ratio), 2 * weight), rel=1e-5)


def test_cap_fractions_mark_what_floor_and_cap_change():
    low, high = cap_fractions(mx.array([[0.4, 0.5, 1.0, 5.0, 5.5]]), 0.5, 5.0)
    assert low.tolist() == [[1, 0, 0, 0, 0]]
    assert high.tolist() == [[0, 0, 0, 0, 1]]


def test_the_gate_is_the_plain_gradient_at_ratio_one_and_fades_away_from_it():
    # r = 1: -A * .5 * 4 / tau, slope by logp -A * 4 * .25 = -A whatever tau
    # r = 2, A = 3, tau = 2: sigmoid(2) = .880797 -> -3 * .880797 * 2 = -5.284783; slope -3 * 4 * .880797 * .119203 * 2
    gate = lambda advantage: lambda r, _: gated_surrogate(r, mx.array([[advantage]]), 2.0, 4.0)
    assert value_and_slope(gate(3.0), 1.0) == pytest.approx((-3.0, -3.0), abs=1e-5)
    assert value_and_slope(gate(-3.0), 1.0) == pytest.approx((1.5, 3.0), abs=1e-5)
    assert value_and_slope(gate(3.0), 2.0) == pytest.approx((-5.284783, -2.519846), abs=1e-5)


# Two rows over six columns. Row 0: turn 0 writes columns 0 and 1, turn 1 column 4; row 1: turn 0 writes column 2.
TURNS = mx.array([[0, 0, -1, -1, 1, -1], [-1, -1, 0, -1, -1, -1]], dtype=mx.int32)
ACTED = TURNS >= 0
LOG_RATIO = mx.array([[0.1, 0.3, math.nan, 9.0, -0.7, math.inf], [math.nan, 9.0, 0.5, 9.0, 9.0, 9.0]])


def ratios(level: str) -> list[list[float]]:
    return ratio_at(level, LOG_RATIO, mx.zeros((2, 6)), ACTED, TURNS).tolist()


@pytest.mark.parametrize(
    ("level", "first", "second", "last"),
    [
        ("token", 0.1, 0.3, -0.7),
        ("turn", 0.2, 0.2, -0.7),  # (.1 + .3) / 2
        ("sequence", -0.1, -0.1, -0.1),  # (.1 + .3 - .7) / 3
        ("sequence_product", -0.3, -0.3, -0.3),  # .1 + .3 - .7
    ],
)
def test_a_token_answers_for_itself_its_turn_or_its_row(level, first, second, last):
    expected = [[math.exp(first), math.exp(second), 1, 1, math.exp(last), 1], [1, 1, math.exp(0.5), 1, 1, 1]]
    for got, want in zip(ratios(level), expected, strict=True):
        assert got == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("level", "slopes"),
    [
        # weights 1 and 10 on turn 0, 100 on turn 1; each ratio's slope is shared among those it averages
        ("token", [1 * math.exp(0.1), 10 * math.exp(0.3), 100 * math.exp(-0.7)]),
        ("turn", [11 / 2 * math.exp(0.2), 11 / 2 * math.exp(0.2), 100 * math.exp(-0.7)]),
        ("sequence", [111 / 3 * math.exp(-0.1)] * 3),
        ("sequence_product", [111 * math.exp(-0.3)] * 3),
    ],
)
def test_the_slope_of_a_ratio_goes_to_every_token_in_it_and_to_no_other(level, slopes):
    weights = mx.array([[1.0, 10.0, 3.0, 3.0, 100.0, 3.0], [0.0] * 6])
    got = mx.grad(lambda logp: (ratio_at(level, logp, mx.zeros((2, 6)), ACTED, TURNS) * weights).sum())(LOG_RATIO)
    assert got[0].tolist() == pytest.approx([slopes[0], slopes[1], 0, 0, slopes[2], 0], rel=1e-5)
    assert got[1].tolist() == [0] * 6


@pytest.mark.parametrize("level", ["token", "turn", "sequence", "sequence_product"])
def test_old_is_a_constant_at_every_level(level):
    logp = mx.array([[-1.0, -2.0], [-3.0, -4.0]])
    turns = mx.zeros((2, 2), dtype=mx.int32)
    value, slope = mx.value_and_grad(lambda x: ratio_at(level, x, x, mx.ones((2, 2)), turns).sum())(logp)
    assert value.item() == 4
    assert slope.tolist() == [[2.0 if level == "sequence_product" else 1.0] * 2] * 2


@pytest.mark.parametrize("level", ["token", "turn", "sequence", "sequence_product"])
def test_the_clamp_is_put_on_the_exponent_of_every_level(level):
    # two tokens of +15: mean 15, sum 30. At a clamp of 20 only the product is held; at 10 all are
    logp, zeros, turns = mx.full((1, 2), 15.0), mx.zeros((1, 2)), mx.zeros((1, 2), dtype=mx.int32)
    at = lambda clamp: ratio_at(level, logp, zeros, mx.ones((1, 2)), turns, clamp)[0, 0].item()
    assert at(20.0) == pytest.approx(math.exp(20 if level == "sequence_product" else 15), rel=1e-5)
    assert at(10.0) == pytest.approx(math.exp(10), rel=1e-5)
    assert mx.grad(lambda x: ratio_at(level, x, zeros, mx.ones((1, 2)), turns, 10.0).sum())(logp).tolist() == [[0, 0]]


def test_without_a_clamp_a_ratio_beyond_float32_still_has_a_clip_without_nan():
    # exp(100) overflows; the clip holds at 1.2 and the slope is 0, not 0 * inf
    def term(logp):
        return clipped_surrogate(
            ratio_at("token", logp, mx.zeros((1, 1)), mx.ones((1, 1)), None, None), mx.array([[1.0]]), 0.2, 0.2
        ).sum()

    value, slope = mx.value_and_grad(term)(mx.array([[100.0]]))
    assert value.item() == pytest.approx(-1.2, abs=1e-6)
    assert slope.item() == 0


def test_a_turn_level_without_turns_and_an_unknown_level_are_refused():
    ones = mx.ones((1, 1))
    with pytest.raises(ValueError, match="turn_index"):
        ratio_at("turn", ones, ones, ones, None)
    with pytest.raises(ValueError, match="token, turn, sequence or sequence_product"):
        ratio_at("row", ones, ones, ones, None)
