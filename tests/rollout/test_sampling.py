import math

import mlx.core as mx
import pytest

from mlxrl_runs.rollout.sampling import Sampling, _kept, draw, row_keys

LOGITS = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))


def kept(**changes):
    return [math.isfinite(score) for score in _kept(LOGITS, Sampling(**changes)).tolist()[0]]


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


def test_draws_follow_the_softmax():
    rows = 20_000
    keys = row_keys([("softmax", row) for row in range(rows)])
    tokens = draw(mx.broadcast_to(LOGITS, (rows, 4)), keys, 0, Sampling()).tokens
    for token, probability in enumerate([0.5, 0.3, 0.15, 0.05]):
        share = (tokens == token).mean().item()
        assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / rows)


def test_h09_the_log_probability_is_taken_at_the_sampling_temperature_over_the_full_vocabulary():
    # logits (2, 0) at temperature .5 are (4, 0): log p = -log(1 + e^-4) = -.01815; undivided -.12693
    logits, keys = mx.array([[2.0, 0.0]]), row_keys([("h09",)])
    drawn = draw(logits, keys, 0, Sampling(temperature=0.5, top_k=1))
    assert drawn.tokens.item() == 0
    assert drawn.logp.item() == pytest.approx(-0.01815, abs=1e-5)


def test_a_rows_draw_is_a_function_of_its_key_and_position():
    keys = row_keys([("a",), ("b",), ("c",)])
    logits = mx.zeros((3, 50))
    whole = draw(logits, keys, 4, Sampling()).tokens.tolist()
    assert draw(logits[1:], keys[1:], 4, Sampling()).tokens.tolist() == whole[1:]
    assert len({tuple(draw(logits, keys, position, Sampling()).tokens.tolist()) for position in range(6)}) == 6
