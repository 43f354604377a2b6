import math

import mlx.core as mx
import pytest

from mlxrl_runs.maths.logprob import entropy, token_logp


def test_log_probabilities_are_those_of_the_tempered_distribution():
    # logits 2, 0 at T .5 become 4, 0: -log(1 + e^-4) = -.01815; undivided it would be -log(1 + e^-2) = -.12693
    logits, labels = mx.array([[[2.0, 0.0]]]), mx.array([[0]])
    assert token_logp(logits, labels, 0.5).item() == pytest.approx(-0.01815, abs=1e-5)
    assert token_logp(logits, labels).item() == pytest.approx(-0.12693, abs=1e-5)


def test_temperature_zero_has_no_log_probability():
    with pytest.raises(ValueError, match="temperature must be > 0"):
        token_logp(mx.zeros((1, 1, 2)), mx.zeros((1, 1), dtype=mx.int32), 0.0)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        entropy(mx.zeros((1, 1, 2)), 0.0)


def test_each_position_reads_its_own_label():
    # p = (.25, .75) and (.9, .1)
    logits = mx.log(mx.array([[[0.25, 0.75], [0.9, 0.1]]]))
    got = token_logp(logits, mx.array([[1, 0]])).tolist()[0]
    assert got == pytest.approx([math.log(0.75), math.log(0.9)], abs=1e-6)


def test_the_gradient_is_one_hot_minus_probability_over_the_temperature():
    # p = softmax(0, log 3) = (.25, .75) at T 1 -> for label 0: (.75, -.75); with T 2 and doubled logits, half of it
    slope = mx.grad(lambda logits, temperature: token_logp(logits, mx.array([[0]]), temperature).sum())
    logits = mx.array([[[0.0, math.log(3)]]])
    assert slope(logits, 1.0).tolist()[0][0] == pytest.approx([0.75, -0.75], abs=1e-6)
    assert slope(2 * logits, 2.0).tolist()[0][0] == pytest.approx([0.375, -0.375], abs=1e-6)


def test_a_shift_of_all_logits_changes_nothing_and_overflows_nowhere():
    logits, labels = mx.array([[[1.0, 2.0, 4.0]]]), mx.array([[2]])
    assert token_logp(logits + 512, labels).item() == pytest.approx(token_logp(logits, labels).item(), abs=1e-4)
    assert entropy(logits + 512).item() == pytest.approx(entropy(logits).item(), abs=1e-4)


def test_half_precision_logits_are_reduced_in_float32():
    logits = mx.array([[[1.0, 2.0, 4.0]]]).astype(mx.bfloat16)
    got = token_logp(logits, mx.array([[2]]))
    assert got.dtype == mx.float32
    # -log(1 + e^-2 + e^-3) = -.16985
    assert got.item() == pytest.approx(-0.16985, abs=1e-5)


def test_entropy_runs_from_zero_to_log_of_the_vocabulary():
    assert entropy(mx.zeros((1, 1, 8))).item() == pytest.approx(math.log(8), abs=1e-6)
    assert entropy(mx.array([[[0.0, 200.0, 0.0]]])).item() == 0


def test_entropy_is_that_of_the_tempered_distribution():
    # logits 0, 2 log 3 at T 2: p = (.25, .75) -> .25 log 4 + .75 log(4 / 3) = .56234
    assert entropy(mx.array([[[0.0, 2 * math.log(3)]]]), 2.0).item() == pytest.approx(0.56234, abs=1e-5)


def test_the_entropy_gradient_flattens_the_distribution():
    # dH/dz_i = -p_i (log p_i + H): p = (.25, .75), H = .56234 -> .25 * (1.38629 - .56234) = .20599 and its opposite
    slope = mx.grad(lambda logits: entropy(logits).sum())(mx.array([[[0.0, math.log(3)]]]))
    assert slope.tolist()[0][0] == pytest.approx([0.20599, -0.20599], abs=1e-5)


def test_a_forbidden_token_adds_nothing_to_the_entropy_or_its_gradient():
    value, slope = mx.value_and_grad(lambda logits: entropy(logits).sum())(mx.array([[[0.0, 0.0, -math.inf]]]))
    assert value.item() == pytest.approx(math.log(2), abs=1e-6)
    assert slope.tolist()[0][0] == pytest.approx([0, 0, 0], abs=1e-6)
