"""What counts as a collapse, and what counts as noise."""

from mlxrl_runs.training.collapse import CollapseGuard
from mlxrl_runs.training.signal import lack_of_signal


def guard(window=3, lost=0.4):
    watching = CollapseGuard(window, lost)
    watching.begin(0.5, 200)
    return watching


def test_held_out_success_below_the_start_by_more_than_chance_is_a_collapse():
    # standard errors of .5 and .38 in 200 episodes: .0354 and .0343; twice their hypotenuse is .0986
    assert guard().after_evaluation(0.41, 200) is None
    assert "fell to 0.380; it was 0.500" in guard().after_evaluation(0.38, 200)


def test_a_few_episodes_prove_nothing():
    assert guard().after_evaluation(0.38, 8) is None


def test_a_policy_that_could_nothing_cannot_fall():
    watching = CollapseGuard(3, 0.4)
    watching.begin(0.0, 200)
    assert watching.after_evaluation(0.0, 200) is None
    assert all(watching.after_step(0.0, 64) is None for _ in range(10))


def test_the_running_success_may_not_lose_more_than_its_share():
    watching = guard()
    assert [watching.after_step(success, 64) for success in (0.8, 0.8, 0.8, 0.8)] == [None] * 4
    assert watching.after_step(0.2, 64) is None  # .6 over the window: a quarter of .8 is gone
    assert "fell to 0.400 over the last 3 steps; its best was 0.800" in watching.after_step(0.2, 64)


def test_nothing_is_said_before_the_window_is_full():
    watching = guard(window=5)
    assert [watching.after_step(success, 64) for success in (1.0, 0.0, 0.0, 0.0)] == [None] * 4


def test_the_noise_of_rare_success_is_no_collapse():
    watching = guard()
    # .04, then .01, of 3 x 48 episodes: three quarters are gone, yet 6 and 2 successes are what chance gives
    assert [watching.after_step(success, 48) for success in (0.04, 0.04, 0.04, 0.01, 0.01, 0.01)] == [None] * 6


def sampled(success, spread):
    return {"success": success, "reward_std": spread}


def test_a_policy_that_never_succeeds_is_told_before_it_starts():
    # G 8, p .002: 1 - .998^8 = 1.6% of the groups have a success
    warning = lack_of_signal(sampled(0.002, 0.045), 8)
    assert "Only 0.2%" in warning and "about 2% of the groups of 8" in warning and "warm_start" in warning


def test_rewards_that_tell_failures_apart_are_a_signal():
    assert lack_of_signal(sampled(0.002, 0.27), 8) is None  # the shipped model in the doors world, a reward a room
    assert lack_of_signal(sampled(0.0, 0.05), 8) is not None  # three operands: only being cut off costs something
    assert lack_of_signal(sampled(0.2, 0.4), 8) is None


def test_a_policy_that_always_succeeds_is_told_too():
    assert "right already" in lack_of_signal(sampled(0.999, 0.03), 8)
