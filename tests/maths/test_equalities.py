"""What one algorithm has in common with another, as equalities of their formulas: values and gradients."""

import mlx.core as mx
import pytest

from mlxrl_runs.maths import divergence, mismatch, reduction, surrogates, values

MASK = mx.array([[1, 1, 0, 1, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
TURNS = mx.array([[0, 0, -1, 1, 1], [-1, 0, -1, -1, -1], [-1] * 5], dtype=mx.int32)
OLD = mx.array([[-1.0, -0.5, -9.0, -2.0, -0.1], [-9.0, -1.2, -9.0, -9.0, -9.0], [-9.0] * 5])
LOGP = OLD + mx.array([[0.4, -0.1, 5.0, 0.2, -0.6], [5.0, 0.3, 5.0, 5.0, 5.0], [5.0] * 5])
ADVANTAGE = mx.array([[1.5], [-2.0], [3.0]])


def loss(level: str, weights: mx.array, mask: mx.array, turns: mx.array = TURNS, clip: float = 0.2):
    """The clipped loss as a function of logp."""

    def of(logp: mx.array) -> mx.array:
        ratio = surrogates.ratio_at(level, logp, OLD, mask, turns)
        return reduction.weighted_sum(surrogates.clipped_surrogate(ratio, ADVANTAGE, clip, clip), weights)

    return of


def assert_same(one, other, at: mx.array = LOGP) -> None:
    (value, slope), (other_value, other_slope) = mx.value_and_grad(one)(at), mx.value_and_grad(other)(at)
    assert mx.abs(slope).max().item() > 0.01, "nothing to compare"
    assert value.item() == pytest.approx(other_value.item(), rel=1e-6)
    assert mx.allclose(slope, other_slope, rtol=1e-5, atol=1e-7).item()


@pytest.mark.parametrize("level", ["turn", "sequence", "sequence_product"])
def test_with_one_token_a_row_every_level_is_the_token_level(level):
    mask = mx.array([[0, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0] * 5])
    weights = reduction.token_mean(mask)
    turns = mx.where(mask != 0, 0, -1)
    assert_same(loss(level, weights, mask, turns), loss("token", weights, mask, turns))


def test_with_one_turn_a_row_the_turn_level_is_the_sequence_level():
    weights = reduction.token_mean(MASK)
    assert_same(loss("turn", weights, MASK, mx.zeros_like(TURNS)), loss("sequence", weights, MASK))


def test_with_one_token_a_turn_the_turn_level_is_the_token_level():
    weights = reduction.token_mean(MASK)
    each = mx.broadcast_to(mx.arange(5), TURNS.shape)
    assert_same(loss("turn", weights, MASK, each), loss("token", weights, MASK))


def test_at_the_policy_that_sampled_every_level_but_the_product_has_the_gradient_of_reinforce():
    weights = reduction.sequence_mean(MASK)
    reinforce = mx.grad(lambda logp: reduction.weighted_sum(-ADVANTAGE * logp, weights))(OLD)
    for level in ("token", "turn", "sequence"):
        assert mx.allclose(mx.grad(loss(level, weights, MASK))(OLD), reinforce, atol=1e-7).item()


def test_at_the_policy_that_sampled_the_product_has_the_gradient_of_whole_rows():
    # a row's loss, -A times the product over its n tokens, is spread over the n tokens: slope -A / rows for each
    product = mx.grad(loss("sequence_product", reduction.sequence_mean(MASK), MASK))(OLD)
    assert mx.allclose(product, mx.where(MASK != 0, -ADVANTAGE / 3, 0.0), atol=1e-7).item()


def test_the_product_counts_a_row_as_one_action():
    # one token whose log-ratio is the row's sum has the same loss; -.1 and .3 stay inside the clip
    in_one = mx.array([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0] * 5])

    def summed(logp: mx.array) -> mx.array:
        total = mx.where(MASK != 0, logp - OLD, 0.0).sum(axis=-1, keepdims=True)
        ratio = surrogates.importance_ratio(total, mx.zeros((3, 1)))
        term = surrogates.clipped_surrogate(ratio, ADVANTAGE, 0.2, 0.2)
        return reduction.weighted_sum(mx.broadcast_to(term, MASK.shape), reduction.sequence_mean(in_one))

    assert_same(loss("sequence_product", reduction.sequence_mean(MASK), MASK), summed)


def test_a_dual_clip_beyond_every_ratio_is_the_plain_clip():
    ratio = surrogates.ratio_at("token", LOGP, OLD, MASK, None)
    plain = surrogates.clipped_surrogate(ratio, -ADVANTAGE, 0.2, 0.2)
    assert surrogates.clipped_surrogate(ratio, -ADVANTAGE, 0.2, 0.2, 100.0).tolist() == plain.tolist()
    assert surrogates.clipped_surrogate(ratio, -ADVANTAGE, 0.2, 0.2, 1.25).tolist() != plain.tolist()


def test_an_uncapped_cispo_has_the_gradient_of_an_unclipped_surrogate():
    # r A d logp on both sides; the values differ
    def capped(logp):
        return surrogates.capped_surrogate(surrogates.importance_ratio(logp, OLD), logp, ADVANTAGE, 0.0, 1e9).sum()

    def unclipped(logp):
        return surrogates.clipped_surrogate(surrogates.importance_ratio(logp, OLD), ADVANTAGE, 1.0, 1e9).sum()

    assert mx.allclose(mx.grad(capped)(LOGP), mx.grad(unclipped)(LOGP), rtol=1e-5).item()


@pytest.mark.parametrize("temperatures", [(1.0, 1.05), (3.0, 0.5)])
def test_at_the_policy_that_sampled_the_gate_has_the_gradient_of_the_clip(temperatures):
    def gated(logp):
        return surrogates.gated_surrogate(surrogates.importance_ratio(logp, OLD), ADVANTAGE, *temperatures).sum()

    def clipped(logp):
        return surrogates.clipped_surrogate(surrogates.importance_ratio(logp, OLD), ADVANTAGE, 0.2, 0.2).sum()

    assert mx.allclose(mx.grad(gated)(OLD), mx.grad(clipped)(OLD), rtol=1e-5).item()


def test_at_the_policy_that_sampled_a_corrected_k3_has_the_gradient_of_k2():
    def kl(gradient):
        return lambda logp: divergence.estimate("k3", gradient, logp, OLD - 0.7, OLD).sum()

    assert mx.allclose(mx.grad(kl("corrected"))(OLD), mx.grad(kl("k2"))(OLD), rtol=1e-5).item()
    assert not mx.allclose(mx.grad(kl("plain"))(OLD), mx.grad(kl("k2"))(OLD), rtol=0.1).item()


def test_weights_of_a_sampler_that_is_the_old_policy_are_the_ratio_up_to_the_cap():
    weights = mismatch.importance_weights(LOGP, OLD, MASK, "truncate", 1.3, "sequence")
    ratio = surrogates.ratio_at("sequence_product", LOGP, OLD, MASK, None)
    assert mx.allclose(weights, mx.minimum(ratio, mx.where(MASK != 0, 1.3, 1.0)), rtol=1e-6).item()
    assert weights.max().item() == pytest.approx(1.3)


def test_a_value_of_nothing_leaves_the_discounted_reward_as_advantage():
    # the setting in which PPO with GAE is REINFORCE with a return to go: reward 1 at the end, .9 a token
    rewards = mx.array([[0.0, 0.0, 9.0, 0.0, 1.0]])
    advantage, returns = values.gae(rewards, mx.zeros((1, 5)), MASK[:1], 0.9, 1.0)
    assert advantage.tolist()[0] == pytest.approx([0.729, 0.81, 0, 0.9, 1.0], abs=1e-6)
    assert returns.tolist() == advantage.tolist()


@pytest.mark.parametrize("level", ["token", "turn", "sequence", "sequence_product"])
@pytest.mark.parametrize("weigh", [reduction.token_mean, reduction.sequence_mean, reduction.sequence_sum])
def test_where_everything_is_masked_loss_and_gradient_are_zero(level, weigh):
    nothing, broken = mx.zeros((3, 5)), mx.full((3, 5), float("nan"))
    value, slope = mx.value_and_grad(loss(level, weigh(nothing), nothing, mx.full((3, 5), -1)))(broken)
    assert value.item() == 0
    assert slope.tolist() == nothing.tolist()
