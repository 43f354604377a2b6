import math

import mlx.core as mx
import pytest

from mlxrl_runs.maths import exponential
from mlxrl_runs.rollout.sampling import NEVER, Sampling, _kept, draw, row_keys

LOGITS = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))


def kept(**changes):
    return [score > NEVER for score in _kept(LOGITS, Sampling(**changes)).tolist()[0]]


def drawn(logits, keys, position=0, greedy=False, **sampling):
    rows = logits.shape[0]
    positions = mx.full((rows,), position, dtype=mx.int32)
    return draw(logits, keys, positions, Sampling(**sampling), mx.array([greedy] * rows))


def test_top_k_keeps_the_k_likeliest():
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_k=0) == kept(top_k=9) == [True] * 4


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    # .5 does not reach .7, .5 + .3 does
    assert kept(top_p=0.7) == [True, True, False, False]
    assert kept(top_p=0.01) == [True, False, False, False]


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest():
    # .25 x .5 = .125: .15 stays, .05 goes
    assert kept(min_p=0.25) == [True, True, True, False]


def shares(logits, rows, **sampling):
    """How often each token is drawn from one row of logits."""
    keys = row_keys([("shares", row) for row in range(rows)])
    tokens = drawn(mx.broadcast_to(logits, (rows, logits.shape[1])), keys, **sampling).tokens
    return [(tokens == token).mean().item() for token in range(logits.shape[1])]


def test_draws_follow_the_softmax():
    rows = 20_000
    for share, probability in zip(shares(LOGITS, rows), [0.5, 0.3, 0.15, 0.05], strict=True):
        assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / rows)


@pytest.mark.parametrize("vocabulary", [100, 363])
def test_draws_follow_the_softmax_over_a_vocabulary_of_many_blocks_the_last_of_them_not_full(vocabulary):
    rows, logits = 20_000, 2 * mx.random.normal((1, vocabulary), key=mx.random.key(1))
    expected = mx.softmax(logits, axis=-1).tolist()[0]
    found = shares(logits, rows)
    # the sum over tokens of (seen - expected)^2 / expected has mean V - 1 and variance 2 (V - 1)
    chi_square = sum(rows * (share - p) ** 2 / p for share, p in zip(found, expected, strict=True))
    assert abs(chi_square - (vocabulary - 1)) < 5 * math.sqrt(2 * (vocabulary - 1))


def test_only_what_is_kept_is_drawn_wherever_its_block_is():
    logits = mx.random.normal((1, 363), key=mx.random.key(2))
    best = set(mx.argsort(-logits[0])[:3].tolist())
    assert {token for token, share in enumerate(shares(logits, 500, top_k=3)) if share} == best


def test_a_bias_moves_draws_and_leaves_the_log_probability_alone():
    # .05 e^9 is 405 times the other tokens' .95: token 3 is nearly always drawn, and its log p is still log .05
    assert shares(LOGITS, 300, token_bias={3: 9.0})[3] > 0.95
    assert shares(LOGITS, 300, token_bias={0: -math.inf})[0] == 0
    biased = drawn(LOGITS, row_keys([("b",)]), token_bias={3: 50.0})
    assert biased.tokens.item() == 3 and biased.logp.item() == pytest.approx(math.log(0.05), abs=1e-5)


def test_greedy_takes_the_likeliest():
    logits = mx.random.normal((50, 363), key=mx.random.key(3))
    keys = row_keys([("greedy", row) for row in range(50)])
    assert drawn(logits, keys, greedy=True).tokens.tolist() == mx.argmax(logits, axis=-1).tolist()


def test_h09_the_log_probability_is_taken_at_the_sampling_temperature_over_the_full_vocabulary():
    # logits (2, 0) at temperature .5 are (4, 0): log p = -log(1 + e^-4) = -.01815; undivided -.12693
    new = drawn(mx.array([[2.0, 0.0]]), row_keys([("h09",)]), temperature=0.5, top_k=1)
    assert new.tokens.item() == 0
    assert new.logp.item() == pytest.approx(-0.01815, abs=1e-5)


def test_a_rows_draw_is_a_function_of_its_key_and_position():
    keys = row_keys([("a",), ("b",), ("c",)])
    logits = mx.zeros((3, 50))
    whole = drawn(logits, keys, 4).tokens.tolist()
    assert drawn(logits[1:], keys[1:], 4).tokens.tolist() == whole[1:]
    assert len({tuple(drawn(logits, keys, position).tokens.tolist()) for position in range(6)}) == 6


@pytest.mark.parametrize("slow", [True, False])
def test_the_exponential_of_a_slow_cpu_is_that_of_mlx(slow, monkeypatch):
    monkeypatch.setattr(exponential, "is_slow", lambda: slow)
    x = mx.array([-200.0, -87.0, -20.0, -1.0, -1e-4, 0.0, 0.5, 20.0, 80.0])
    assert mx.allclose(exponential.exp(x), mx.exp(x), rtol=4e-7, atol=1e-37)
    assert mx.allclose(exponential.silu(x), x * mx.sigmoid(x), rtol=1e-6, atol=1e-35)
    rows = mx.stack([x, x - 100, mx.full(x.shape, NEVER)])
    assert mx.allclose(exponential.logsumexp(rows), mx.logsumexp(rows, axis=-1), rtol=1e-6)
