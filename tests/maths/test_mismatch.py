import math

import mlx.core as mx
import pytest

from mlxrl_runs.maths.mismatch import gap, importance_weights

# w = 2, .5, 3 on the first row's actions, 1 on the second's only one
MASK = mx.array([[1, 1, 0, 1], [0, 1, 0, 0]])
TRAINER = mx.array([[math.log(2), math.log(0.5), math.nan, math.log(3)], [math.inf, 0.0, 9.0, 9.0]])
SAMPLER = mx.zeros((2, 4))


def weights(correction: str, cap: float, level: str) -> list[list[float]]:
    return importance_weights(TRAINER, SAMPLER, MASK, correction, cap, level).tolist()


@pytest.mark.parametrize(
    ("correction", "level", "cap", "first"),
    [
        ("truncate", "token", 2.5, [2.0, 0.5, 1.0, 2.5]),
        ("mask", "token", 2.5, [2.0, 0.5, 1.0, 0.0]),
        ("truncate", "sequence", 2.5, [2.5, 2.5, 1.0, 2.5]),  # 2 * .5 * 3 = 3
        ("mask", "sequence", 2.5, [0.0, 0.0, 1.0, 0.0]),
        ("mask", "sequence", 3.5, [3.0, 3.0, 1.0, 3.0]),
    ],
)
def test_a_weight_beyond_the_cap_is_truncated_or_its_token_left_out(correction, level, cap, first):
    got = weights(correction, cap, level)
    assert got[0] == pytest.approx(first, rel=1e-6)
    assert got[1] == [1.0] * 4


@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_where_sampler_and_trainer_agree_every_weight_is_one(correction, level):
    logp = mx.array([[-0.3, -2.0, -7.5]])
    assert importance_weights(logp, logp, mx.array([[1, 1, 0]]), correction, 2.0, level).tolist() == [[1.0] * 3]


def test_a_weight_is_a_constant():
    slope = mx.grad(lambda logp: importance_weights(logp, SAMPLER, MASK, "truncate", 5.0, "sequence").sum())(TRAINER)
    assert slope.tolist() == [[0.0] * 4] * 2


def test_a_difference_that_overflows_is_above_every_cap():
    logp, sampler, mask = mx.array([[100.0]]), mx.array([[0.0]]), mx.array([[1]])
    assert importance_weights(logp, sampler, mask, "truncate", 2.0, "token").item() == 2
    assert importance_weights(logp, sampler, mask, "mask", 2.0, "token").item() == 0


def test_a_broken_log_probability_is_not_taken_for_a_large_weight():
    broken = mx.array([[math.nan]])
    for correction in ("truncate", "mask"):
        assert math.isnan(
            importance_weights(broken, mx.zeros((1, 1)), mx.ones((1, 1)), correction, 2.0, "token").item()
        )


def test_the_gap_is_measured_over_action_tokens_only():
    # trainer - sampler = -1, +.5 | -.25: mean 1.75 / 3, largest 1
    # k3 of sampler || trainer, d = sampler - trainer = 1, -.5, .25: e^-1 - 0 = .367879, e^.5 - 1.5 = .148721,
    # e^-.25 - .75 = .028801, mean .181800 (the other way round 1 - e gives .718282 for the first)
    trainer = mx.array([[-2.0, -1.5, math.nan], [-1.25, 9.0, 9.0]])
    sampler = mx.array([[-1.0, -2.0, 0.0], [-1.0, 0.0, 0.0]])
    got = gap(trainer, sampler, mx.array([[1, 1, 0], [1, 0, 0]]))
    assert got["mismatch/mean"] == pytest.approx(1.75 / 3, abs=1e-6)
    assert got["mismatch/max"] == 1.0
    assert got["mismatch/kl"] == pytest.approx(0.181800, abs=1e-5)


def test_without_action_tokens_there_is_no_gap():
    assert set(gap(TRAINER, SAMPLER, mx.zeros((2, 4))).values()) == {0.0}


def test_an_unknown_correction_or_level_is_refused():
    ones = mx.ones((1, 1))
    with pytest.raises(ValueError, match="truncate or mask"):
        importance_weights(ones, ones, ones, "clip", 2.0, "token")
    with pytest.raises(ValueError, match="token or sequence"):
        importance_weights(ones, ones, ones, "mask", 2.0, "turn")
