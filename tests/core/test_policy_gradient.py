"""What all policy-gradient algorithms share: terms of the loss worked by hand, and rules between keys."""

import mlx.core as mx
import pytest

from building import one_turn_batch, settings, trajectory, turn
from mlxrl_runs.config import compose_config, validate
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.outputs import TokenOutputs
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.errors import ConfigError


def outputs_of(logp, entropy=None):
    return TokenOutputs(logp, mx.zeros_like(logp) if entropy is None else entropy, mx.zeros_like(logp))


def slope_of(algorithm, term, batch, logp):
    return mx.grad(lambda logp: algorithm.loss(outputs_of(logp), batch)[term])(logp)


def two_turns():
    """tokens: 5 6 | 7 8 | 3 4 1 | 9, of which 3 4 is what the environment answered"""
    answered = turn([9], 0.0, context=[3, 4, 1])
    object.__setattr__(answered, "observation", (0, 2))
    return collate([Group("t", (trajectory(turn([7, 8], 1.0), answered), trajectory(turn([7, 8], 0.0), member=1)))])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.advantage_scaling=batch"], "algorithm.advantage_scaling: got batch; allowed here: group or none"),
        (["algorithm.echo_schedule=linear"], "algorithm.echo_taper_steps: got None; goes with echo_schedule=linear"),
        (["algorithm.kl_target=0.1"], "algorithm.kl_target: got 0.1; it needs a kl_coef"),
        (["algorithm.kl_stop=0.1"], "algorithm.kl_stop: got 0.1; acts from the second time on"),
        (["algorithm.kl_in=reward", "algorithm.kl_gradient=k2"], "algorithm.kl_gradient: got k2; with kl_in=reward"),
        (["algorithm.kl_estimator=k1", "algorithm.kl_coef=1"], "algorithm.kl_estimator: got k1; its own slope"),
        (["algorithm.dual_clip=1.1"], "algorithm.dual_clip: got 1.1; must be above 1 . clip_high=1.2"),
        (["algorithm.minibatches=13"], "algorithm.minibatches: got 13; the 12 groups of a step stay whole"),
        (["algorithm=cispo", "algorithm.ratio_cap=0.28"], "ratio_cap: got 0.28; .*try algorithm.ratio_cap=1.28"),
        (["algorithm.echo_coef=0.1", "env=arithmetic"], "algorithm.echo_coef: got 0.1; .* env=arithmetic has one turn"),
        (["algorithm=rloo", "group_size=1"], "group_size: got 1; algorithm=rloo compares"),
        (["algorithm=reinforce_pp", "algorithm.group_baseline=true", "group_size=1"], "group_size: got 1"),
        (["algorithm=reinforce_pp", "algorithm.group_baseline=true", "algorithm.gamma=0.9"],
         "algorithm.gamma: got 0.9; group_baseline=true compares whole returns"),
        (["algorithm.log_ratio_clamp=100"],
         "algorithm.log_ratio_clamp: got 100; allowed: .* > 0 and <= 80. Try algorithm.log_ratio_clamp=20.0."),
        (["algorithm=ppo", "algorithm.filter_groups=true", "group_size=1"],
         "algorithm.filter_groups: got true; .* group_size=1"),
    ],
)  # fmt: skip
def test_keys_that_do_not_go_together_are_refused_by_name(overrides, said):
    with pytest.raises(ConfigError, match=said):
        validate(compose_config(overrides))


def test_without_a_group_baseline_a_group_may_be_one_episode():
    for name in ("ppo", "reinforce_pp"):
        assert validate(compose_config([f"algorithm={name}", "group_size=1"])).group_size == 1


def test_echo_is_the_mean_cross_entropy_of_what_the_environment_answered_and_of_nothing_else():
    # answers 3 4 with logp -1 and -3, the rest -7: .1 x (1 + 3) / 2; the prompt 5 6 answers nothing, 1 is glue
    algorithm = settings("algorithm", "gigpo", echo_coef=0.1)
    batch = algorithm.credit(two_turns())
    assert batch.observation_mask.tolist() == [[False] * 4 + [True, True, False, False], [False] * 8]
    logp = mx.full(batch.tokens.shape, -7.0)
    logp[0, 4], logp[0, 5] = -1.0, -3.0
    assert algorithm.loss(outputs_of(logp), batch)["echo"].item() == pytest.approx(0.2)
    slope = slope_of(algorithm, "echo", batch, logp)
    assert slope[0].tolist() == pytest.approx([0, 0, 0, 0, -0.05, -0.05, 0, 0])
    plain = settings("algorithm", "gigpo")
    assert "echo" not in plain.loss(outputs_of(logp), plain.credit(two_turns()))


def test_echo_tapers_to_nothing_and_stays_there():
    algorithm = settings("algorithm", "grpo", echo_coef=0.4, echo_schedule="linear", echo_taper_steps=4)
    assert [algorithm.echo_coef_at(step) for step in (1, 2, 4, 5, 9)] == pytest.approx([0.4, 0.3, 0.1, 0.0, 0.0])
    weights = algorithm.credit(two_turns().with_(step=3)).observation_weights
    assert weights.sum().item() == pytest.approx(0.2)


def test_a_bonus_for_entropy_is_its_weighted_mean_taken_off_the_loss():
    # 8 tokens of entropy 2: -.1 x 2
    algorithm = settings("algorithm", "grpo", entropy_coef=0.1)
    batch = algorithm.credit(one_turn_batch([[1.0, 0.0]] * 2))
    terms = algorithm.loss(outputs_of(batch.sampler_logp, mx.full(batch.tokens.shape, 2.0)), batch)
    assert terms["entropy"].item() == pytest.approx(-0.2)


def test_a_token_that_the_trainer_finds_likelier_than_the_sampler_weighs_more_up_to_the_cap():
    # sampled at -1, scored at -1 + log 1.5 and -1 + log 4: weights 1.5 and min(4, 2) = 2, or 0 where such are masked
    base = one_turn_batch([[1.0, 0.0]], lengths=[1, 1])
    logp = mx.array([[0, 0, -1 + 0.405465], [0, 0, -1 + 1.386294]])
    found = {}
    for correction in ("none", "truncate", "mask"):
        algorithm = settings("algorithm", "grpo", mismatch_correction=correction)
        found[correction] = slope_of(algorithm, "policy", algorithm.credit(base), logp)[:, 2].tolist()
    a = 0.5 * 0.5 / (0.5**0.5 + 1e-4)  # half of the advantage: two tokens
    assert found["none"] == pytest.approx([-a, a], rel=1e-4)
    assert found["truncate"] == pytest.approx([-1.5 * a, 2 * a], rel=1e-4)
    assert found["mask"] == pytest.approx([-1.5 * a, 0], rel=1e-4)


def test_the_kl_coefficient_of_the_batch_goes_before_that_of_the_config():
    algorithm = settings("algorithm", "grpo", kl_coef=1.0)
    batch = algorithm.credit(one_turn_batch([[1.0, 1.0]]).with_(reference_logp=mx.full((2, 4), -2.0)))
    losses = [algorithm.loss(outputs_of(batch.sampler_logp), batch.with_(kl_coef=c))["kl"].item() for c in (None, 0.5)]
    assert losses == pytest.approx([0.36788, 0.18394], abs=1e-5)  # k3 of -1 against -2: exp(-1) - 1 + 1


def test_a_corrected_kl_is_times_the_ratio_of_the_level_in_use():
    # log-ratios .1 and .3 of one row, mean .2, sum .4; d = -1 on both: k3 = e - 2 = .71828
    base = one_turn_batch([[1.0, 1.0]]).with_(old_logp=mx.zeros((2, 4)))
    logp = mx.array([[0, 0, 0.1, 0.3]] * 2)
    expected = {"token": 0.71828 * (1.10517 + 1.34986) / 2, "sequence": 0.71828 * 1.2214, "turn": 0.71828 * 1.2214,
                "sequence_product": 0.71828 * 1.49182}  # fmt: skip
    for level, value in expected.items():
        algorithm = settings("algorithm", "grpo", kl_coef=1.0, kl_gradient="corrected", ratio_level=level)
        batch = algorithm.credit(base.with_(reference_logp=logp + 1))
        assert algorithm.loss(outputs_of(logp), batch)["kl"].item() == pytest.approx(value, abs=1e-4), level


def test_a_population_std_is_an_option():
    # returns 1 and 0: std of a sample .7071, of a population .5
    for ddof, std in ((1, 0.5**0.5), (0, 0.5)):
        batch = settings("algorithm", "grpo", std_ddof=ddof).credit(one_turn_batch([[1.0, 0.0]]))
        assert batch.advantage[0, 2].item() == pytest.approx(0.5 / (std + 1e-4), abs=1e-6)


def test_a_clip_can_be_set_so_wide_that_it_never_acts():
    # r = e^3 with A > 0 in row 0 and e^-3 with A < 0 in row 1: the slope is -r A w, which the default clip silences
    logp = mx.array([[0, 0, 3.0, 0], [0, 0, -3.0, 0]])
    slopes = {}
    for low, high in ((1.0, 1e9), (0.2, 0.2)):
        algorithm = settings("algorithm", "grpo", clip_low=low, clip_high=high)
        batch = algorithm.credit(one_turn_batch([[1.0, 0.0]]).with_(old_logp=mx.zeros((2, 4))))
        slopes[low] = slope_of(algorithm, "policy", batch, logp)[:, 2].tolist()
    a = 0.70701 / 4
    assert slopes == {1.0: pytest.approx([-a * 20.0855, a * 0.049787], abs=1e-3), 0.2: [0, 0]}


@pytest.mark.parametrize(
    ("level", "expected"),
    # log-ratios .1 .3 | .2 of two turns: means .2 and .2, of the row .2, their sum .6
    [("token", [1.10517, 1.34986, 1.2214]), ("turn", [1.2214] * 3), ("sequence", [1.2214] * 3),
     ("sequence_product", [1.82212] * 3)],
)  # fmt: skip
def test_a_ratio_belongs_to_a_token_a_turn_or_a_row(level, expected):
    batch = two_turns()
    moved = mx.zeros(batch.tokens.shape)
    moved[0, 2], moved[0, 3], moved[0, 7] = 0.1, 0.3, 0.2
    algorithm = settings("algorithm", "grpo", ratio_level=level)
    ratio = algorithm.ratio(moved, batch.with_(old_logp=mx.zeros(batch.tokens.shape)))
    assert [ratio[0, place].item() for place in (2, 3, 7)] == pytest.approx(expected, abs=1e-4)
