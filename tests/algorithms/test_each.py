"""What is each algorithm's own, worked by hand."""

from dataclasses import replace

import mlx.core as mx
import pytest

from building import one_turn_batch, settings, trajectory, turn
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.outputs import TokenOutputs
from mlxrl_runs.core.trajectory import EndReason, Group, StopReason


def firsts(batch, column=2):
    """The advantage of each row's first action token."""
    return batch.advantage[:, column].tolist()


def policy_gradient(algorithm, batch, logp):
    loss = lambda logp: algorithm.loss(TokenOutputs(logp, logp, logp), batch)["policy"]
    return mx.grad(loss)(logp)


def test_dr_grpo_divides_by_no_std_and_by_no_length_of_this_batch():
    algorithm = settings("algorithm", "dr_grpo", reduction_length=10)
    batch = algorithm.credit(one_turn_batch([[4.0, 0.0]], lengths=[1, 3]))
    assert firsts(batch) == [2.0, -2.0]
    assert batch.weights[1].tolist() == pytest.approx([0, 0, 0.05, 0.05, 0.05])  # 1 / (2 rows x 10)


def test_rloo_takes_the_mean_of_the_others_off():
    # 3 - (1 + 2) / 2 = 1.5, 1 - 2.5, 2 - 2
    assert firsts(settings("algorithm", "rloo").credit(one_turn_batch([[3.0, 1.0, 2.0]]))) == pytest.approx(
        [1.5, -1.5, 0]
    )


def test_rloo_over_the_batch_is_centred_and_scaled():
    # 1.5 -1.5 0 and 0 0 0: mean 0, std sqrt(4.5 / 5)
    algorithm = settings("algorithm", "rloo", advantage_scaling="batch")
    batch = algorithm.credit(one_turn_batch([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0]]))
    assert firsts(batch)[:2] == pytest.approx([1.5 / 0.9487833, -1.5 / 0.9487833], abs=1e-5)


def test_rloo_on_whole_rows_pays_the_ratio_of_their_probabilities():
    # log-ratios .1 + .05 in row 0: r = e^.15 = 1.16183, A = 1: slope on each of its tokens -r / 2 rows
    algorithm = settings("algorithm", "rloo", ratio_level="sequence_product", reduction="sequence_mean")
    batch = algorithm.credit(one_turn_batch([[1.0, 0.0]]).with_(old_logp=mx.zeros((2, 4))))
    slope = policy_gradient(algorithm, batch, mx.array([[0, 0, 0.1, 0.05], [0, 0, 0, 0]]))
    assert slope[0].tolist() == pytest.approx([0, 0, -0.58092, -0.58092], abs=1e-5)


def test_reinforce_pp_returns_are_whitened_over_all_tokens():
    # one-token rows of 1 and 0: mean .5, std of a sample .7071
    batch = settings("algorithm", "reinforce_pp").credit(one_turn_batch([[1.0], [0.0]], lengths=[1]))
    assert firsts(batch) == pytest.approx([0.70711, -0.70711], abs=1e-4)


def test_reinforce_pp_discounts_per_token_of_its_own():
    # gamma .5, reward 1 on the last of three tokens, then the environment's token, which costs no discount
    algorithm = settings("algorithm", "reinforce_pp", gamma=0.5, advantage_scaling="none")
    batch = algorithm.credit(collate([Group("t", (trajectory(turn([7, 8]), turn([9], 1.0, context=[3])),))]))
    assert batch.advantage[0].tolist() == pytest.approx([0, 0, 0.25, 0.5, 0, 1.0])


def test_reinforce_pp_with_a_group_baseline_takes_the_groups_mean_off_first():
    # 1 0 and 10 10: centred .5 -.5 0 0, over 8 tokens: mean 0, std sqrt(4 x .25 / 7)
    algorithm = settings("algorithm", "reinforce_pp", group_baseline=True)
    batch = algorithm.credit(one_turn_batch([[1.0, 0.0], [10.0, 10.0]]))
    assert firsts(batch) == pytest.approx([1.32288, -1.32288, 0, 0], abs=1e-4)


def test_gspo_has_one_ratio_a_row_and_clips_it_narrowly():
    # mean log-ratio 1e-4 in row 0: inside 1 + 4e-4, and 1e-3 in the other run: beyond, no slope
    algorithm = settings("algorithm", "gspo")
    batch = algorithm.credit(one_turn_batch([[1.0, 0.0]]).with_(old_logp=mx.zeros((2, 4))))
    inside = policy_gradient(algorithm, batch, mx.array([[0, 0, 1e-4, 1e-4], [0, 0, 0, 0]]))
    beyond = policy_gradient(algorithm, batch, mx.array([[0, 0, 2e-3, 0], [0, 0, 0, 0]]))
    assert inside[0, 2].item() == pytest.approx(-0.70701 / 4, abs=1e-4)  # A r / (2 rows x 2 tokens)
    assert beyond[0].tolist() == [0] * 4


def test_luspo_is_gspo_whose_rows_weigh_by_their_length():
    algorithm = settings("algorithm", "gspo", reduction="sequence_sum")
    batch = algorithm.credit(one_turn_batch([[1.0, 0.0]], lengths=[1, 3]))
    assert batch.weights.sum(axis=1).tolist() == pytest.approx([0.5, 1.5])


def test_cispo_keeps_a_capped_tokens_slope_where_grpo_has_none():
    # r = e^2 = 7.389, cap 5, A = .70701, 4 tokens
    logp, base = mx.array([[0, 0, 2.0, 0], [0, 0, 0, 0]]), one_turn_batch([[1.0, 0.0]]).with_(old_logp=mx.zeros((2, 4)))
    slopes = {}
    for name in ("cispo", "grpo"):
        algorithm = settings("algorithm", name)
        slopes[name] = policy_gradient(algorithm, algorithm.credit(base), logp)[0, 2].item()
    assert slopes == {"cispo": pytest.approx(-5 * 0.70701 / 4, abs=1e-4), "grpo": 0}
    algorithm = settings("algorithm", "cispo")
    metrics = algorithm.ratio_metrics(logp, algorithm.credit(base))
    assert metrics["clip/high_fraction"] == 0.25 and metrics["clip/low_fraction"] == 0


def test_sapo_fades_where_the_clip_would_cut():
    # tau 1, r = 2: slope by r of 4 sigmoid(r - 1): 4 x .731 x .269 = .78645, times r, A / 4 tokens
    algorithm = settings("algorithm", "sapo")
    batch = algorithm.credit(one_turn_batch([[1.0, 0.0]]).with_(old_logp=mx.zeros((2, 4))))
    slope = policy_gradient(algorithm, batch, mx.array([[0, 0, 0.693147, 0], [0, 0, 0, 0]]))
    assert slope[0, 2].item() == pytest.approx(-0.78645 * 2 * 0.70701 / 4, abs=1e-4)


def test_dapo_puts_a_growing_price_on_the_last_part_of_the_limit():
    # limit 10, last fifth of it: free to 8 tokens, half the price at 9, all of it at 10
    algorithm = settings("algorithm", "dapo", overlong_limit=10, overlong_penalty=2.0)
    batch = one_turn_batch([[1.0, 1.0, 1.0]], lengths=[8, 9, 10])
    assert [algorithm.turn_reward(row.turns[0]) for row in batch.trajectories] == pytest.approx([1.0, 0.0, -1.0])
    assert firsts(algorithm.credit(batch)) == pytest.approx([1.0, 0, -1.0], abs=1e-3)
    assert algorithm.metrics(batch) == {"reward/overlong": pytest.approx(-1.0)}
    free = settings("algorithm", "dapo", overlong_limit=10, overlong_penalty=0.0)
    assert firsts(free.credit(batch)) == [0, 0, 0]


def test_dapo_wants_groups_that_disagree_by_what_was_paid_and_not_by_length():
    algorithm = settings("algorithm", "dapo", overlong_limit=4)
    short, long = turn([7], 1.0), turn([7, 8, 9, 6], 1.0)
    assert not algorithm.wants(Group("t", (trajectory(short), trajectory(long, member=1))))
    assert algorithm.wants(Group("t", (trajectory(short), trajectory(replace(long, reward=0.0), member=1))))


def test_gigpo_with_similar_states_compares_turns_that_equal_ones_leave_alone():
    one, other = (
        trajectory(turn([7], 1.0, "room 1, 17 steps")),
        trajectory(turn([7], 0.0, "room 1, 18 steps"), member=1),
    )
    batch = collate([Group("t", (one, other))])
    alone = settings("algorithm", "gigpo")
    together = settings("algorithm", "gigpo", anchor_similarity=0.9)
    assert alone.metrics(alone.credit(batch))["anchor/singleton_fraction"] == 1
    assert together.metrics(together.credit(batch))["anchor/singleton_fraction"] == 0
    assert firsts(together.credit(batch)) == pytest.approx([2 * x for x in firsts(alone.credit(batch))])


def judged(batch, values, final):
    filled = mx.where(batch.action_mask, values, 0.0)
    return batch.with_(values=filled, final_values=mx.array(final), old_logp=batch.sampler_logp)


def test_ppo_pays_what_came_beyond_what_was_expected():
    # gamma = lambda = 1, no scaling, V = .25 before each of two tokens, reward 1 at the end: A = .75 on both
    algorithm = settings("algorithm", "ppo", gae_lambda=1.0, advantage_scaling="none")
    batch = algorithm.credit(judged(one_turn_batch([[1.0]]), 0.25, [9.0]))  # what comes after its end is not read
    assert batch.advantage[0].tolist() == pytest.approx([0, 0, 0.75, 0.75])
    assert batch.returns[0].tolist() == pytest.approx([0, 0, 1.0, 1.0])


def test_ppo_counts_on_what_an_unfinished_episode_is_worth():
    played, earned = trajectory(turn([7, 8], 0.5)), {}
    for asked in ("tokens", "limits", "none"):
        algorithm = settings("algorithm", "ppo", gae_lambda=1.0, advantage_scaling="none", bootstrap=asked)
        for end in EndReason:
            base = judged(collate([Group("t", (replace(played, end=end),))]), 0.0, [2.0])
            earned[asked, end.value] = algorithm.credit(base).returns[0, 2].item()
    open_ends = {key for key, value in earned.items() if value == pytest.approx(2.5)}
    assert open_ends == {("tokens", "max_tokens"), ("limits", "max_tokens"), ("limits", "max_turns")}
    assert all(value == pytest.approx(0.5) for key, value in earned.items() if key not in open_ends)


def test_ppo_holds_a_value_that_ran_away_from_where_it_was():
    # return 1, old value 0, clip .2, value .9: max((.1)^2, (.8)^2) / 2 with no slope; without a clip .005, slope -.1
    batch = judged(one_turn_batch([[1.0]], lengths=[1]), 0.0, [0.0])
    nothing, values = mx.zeros((1, 3)), mx.array([[0, 0, 0.9]])

    def term(values, algorithm):
        outputs = TokenOutputs(nothing, nothing, nothing, values)
        return algorithm.loss(outputs, algorithm.credit(batch))["value"]

    for clip, loss, slope in ((0.2, 0.32, 0.0), (None, 0.005, -0.1)):
        algorithm = settings("algorithm", "ppo", gae_lambda=1.0, value_clip=clip)
        assert term(values, algorithm).item() == pytest.approx(loss, abs=1e-6)
        assert mx.grad(term)(values, algorithm)[0, 2].item() == pytest.approx(slope, abs=1e-6)


def test_a_cut_action_is_not_trained_by_dapo_and_is_by_grpo():
    cut = replace(turn([7, 8], 1.0), stop=StopReason.LENGTH)
    batch = collate([Group("t", (trajectory(cut), trajectory(turn([9, 2], 0.0), member=1)))])
    trained = {name: settings("algorithm", name).credit(batch).weights[0].max().item() > 0 for name in ("dapo", "grpo")}
    assert trained == {"dapo": False, "grpo": True}
