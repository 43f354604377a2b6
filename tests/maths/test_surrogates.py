import mlx.core as mx
import pytest

from mlxrl_runs.maths.surrogates import clip_fractions, clipped_surrogate, importance_ratio


def surrogate_at(ratio: float, advantage: float, clip_low: float = 0.2, clip_high: float = 0.2) -> tuple[float, float]:
    """Value and slope by logp where the policy is `ratio` times as likely as the sampler."""

    def term(logp):
        return clipped_surrogate(logp, mx.zeros((1, 1)), mx.array([[advantage]]), clip_low, clip_high).sum()

    value, slope = mx.value_and_grad(term)(mx.log(mx.array([[ratio]])))
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
    value, slope = mx.value_and_grad(lambda x: clipped_surrogate(x, x, mx.array([[2.0]]), 0.2, 0.2).sum())(logp)
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
    logp = mx.log(mx.array([[0.5, 0.5, 1.0, 1.5, 1.5]]))
    advantage = mx.array([[-1.0, 1.0, 1.0, -1.0, 1.0]])
    low, high = clip_fractions(logp, mx.zeros((1, 5)), advantage, 0.2, 0.28)
    assert low.tolist() == [[1, 0, 0, 0, 0]]
    assert high.tolist() == [[0, 0, 0, 0, 1]]


def test_one_advantage_a_row_serves_all_its_tokens():
    got = clipped_surrogate(mx.zeros((2, 3)), mx.zeros((2, 3)), mx.array([[1.0], [-2.0]]), 0.2, 0.2)
    assert got.tolist() == [[-1.0] * 3, [2.0] * 3]
