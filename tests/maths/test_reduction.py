import math

import mlx.core as mx
import pytest

from mlxrl_runs.maths import reduction
from mlxrl_runs.maths.surrogates import clipped_surrogate, importance_ratio

ONE_AND_THREE = mx.array([[1, 0, 0], [1, 1, 1]])  # two rows, of one and of three tokens
PLUS_AND_MINUS = mx.array([[-1.0, 9.0, 9.0], [1.0, 1.0, 1.0]])  # -A of advantages +1 and -1 at ratio 1; 9 is padding


def loss(weights: mx.array) -> float:
    return reduction.weighted_sum(PLUS_AND_MINUS, weights).item()


def test_the_averaging_decides_the_loss_of_unequal_lengths():
    assert loss(reduction.token_mean(ONE_AND_THREE)) == 0.5  # (-1 + 3) / 4
    assert loss(reduction.sequence_mean(ONE_AND_THREE)) == pytest.approx(0.0, abs=1e-7)  # (-1 + 3 / 3) / 2
    assert loss(reduction.fixed_length(ONE_AND_THREE, 4)) == 0.25  # (-1 + 3) / (2 * 4)
    assert loss(reduction.sequence_sum(ONE_AND_THREE)) == 1.0  # (-1 + 3) / 2
    assert loss(reduction.token_sum(ONE_AND_THREE)) == 2.0


def test_a_token_mean_over_micro_batches_is_not_a_mean_of_means():
    # per-token losses [4] and [0, 0, 0]: 4 / 4 = 1; a mean of means gives 2
    per_token = mx.array([[4.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    weights = reduction.token_mean(ONE_AND_THREE)
    parts = [reduction.weighted_sum(per_token[row : row + 1], weights[row : row + 1]).item() for row in range(2)]
    assert sum(parts) == 1.0


@pytest.mark.parametrize(
    "weigh",
    [
        reduction.token_mean,
        reduction.token_sum,
        reduction.sequence_mean,
        reduction.sequence_sum,
        lambda mask: reduction.sequence_mean(mask, reduction.nonempty_rows(mask)),
        lambda mask: reduction.fixed_length(mask, 7),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_loss_and_gradient_of_micro_batches_add_up_to_the_whole(weigh, size):
    mask = mx.array([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]])
    logp = mx.array([[-0.5, -1.0, -1.5, -2.0, -0.1]] * 4)
    advantage = mx.array([[1.0], [-2.0], [3.0], [0.5]])
    weights = weigh(mask)

    def part(logp, rows):
        term = clipped_surrogate(importance_ratio(logp[rows], logp[rows]), advantage[rows], 0.2, 0.2)
        return reduction.weighted_sum(term, weights[rows])

    whole, whole_slope = mx.value_and_grad(part)(logp, slice(None))
    parts = [mx.value_and_grad(part)(logp, slice(start, start + size)) for start in range(0, 4, size)]
    assert whole.item() != 0
    assert sum(value.item() for value, _ in parts) == pytest.approx(whole.item(), abs=1e-6)
    assert mx.abs(sum(slope for _, slope in parts) - whole_slope).max().item() < 1e-6


def test_a_part_weighs_its_tokens_by_the_count_of_the_whole_step():
    assert reduction.token_mean(mx.array([[1, 1]]), token_count=8).tolist() == [[0.125, 0.125]]


def test_an_empty_row_counts_as_a_row_unless_the_caller_says_otherwise():
    mask = mx.array([[1, 1], [0, 0]])
    assert reduction.sequence_mean(mask).tolist() == [[0.25, 0.25], [0, 0]]
    assert reduction.nonempty_rows(mask).item() == 1
    assert reduction.sequence_mean(mask, reduction.nonempty_rows(mask)).tolist() == [[0.5, 0.5], [0, 0]]
    assert reduction.fixed_length(mask, 4, reduction.nonempty_rows(mask)).tolist() == [[0.25, 0.25], [0, 0]]


@pytest.mark.parametrize("weigh", [reduction.token_mean, reduction.sequence_mean, reduction.sequence_sum])
def test_a_batch_without_a_single_token_weighs_zero_and_is_not_nan(weigh):
    assert weigh(mx.zeros((2, 3))).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert reduction.sequence_mean(mx.zeros((2, 3)), reduction.nonempty_rows(mx.zeros((2, 3)))).sum().item() == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_off_the_mask_reaches_neither_the_loss_nor_the_gradient(poison):
    # two counted tokens with A = 2 at ratio 1: loss -2, slope -1 each; nothing from the third
    mask = mx.array([[1, 1, 0]])
    old_logp = reduction.masked(mx.array([[-1.0, -2.0, poison]]), mask)

    def term(logp):
        ratio = importance_ratio(reduction.masked(logp, mask), old_logp)
        surrogate = clipped_surrogate(ratio, mx.array([[2.0]]), 0.2, 0.2)
        return reduction.weighted_sum(surrogate, reduction.token_mean(mask))

    value, slope = mx.value_and_grad(term)(mx.array([[-1.0, -2.0, poison]]))
    assert value.item() == -2.0
    assert slope.tolist() == [[-1.0, -1.0, 0.0]]


def test_a_weight_of_zero_silences_a_per_token_loss_of_nan():
    value, slope = mx.value_and_grad(reduction.weighted_sum)(mx.array([[3.0, math.nan]]), mx.array([[0.5, 0.0]]))
    assert value.item() == 1.5
    assert slope.tolist() == [[0.5, 0.0]]


def test_whitening_uses_the_tokens_on_the_mask_only():
    # 1, 3: mean 2, variance with n - 1: 2, +-1 / sqrt 2 = +-.70711; keeping the mean adds 2
    values, mask = mx.array([[1.0, math.nan], [3.0, 50.0]]), mx.array([[1, 0], [1, 0]])
    assert reduction.whiten(values, mask).tolist() == [
        [pytest.approx(-0.70711, abs=1e-5), 0],
        [pytest.approx(0.70711, abs=1e-5), 0],
    ]
    assert reduction.whiten_keeping_mean(values, mask).tolist() == [
        [pytest.approx(1.29289, abs=1e-5), 0],
        [pytest.approx(2.70711, abs=1e-5), 0],
    ]


def test_whitening_equal_values_gives_exactly_zero():
    # in float32 the mean of fifteen times 0.7 is not 0.7, and the residue over sqrt(1e-8) would be 6e-4
    assert mx.abs(reduction.whiten(mx.full((3, 5), 0.7), mx.ones((3, 5)))).max().item() == 0
    assert reduction.whiten(mx.array([[4.0, 1.0]]), mx.array([[1, 0]])).tolist() == [[0, 0]]
    assert reduction.whiten(mx.array([[4.0, 1.0]]), mx.zeros((1, 2))).tolist() == [[0, 0]]
