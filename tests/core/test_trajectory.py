import mlx.core as mx

from building import one_turn_batch, trajectory, turn
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.trajectory import Group

EOS = 0  # also what padding is filled with


def two_turns():
    # action [5, 9], observation [7, 7], action [6, EOS]; nothing before the first action but one prompt token
    return trajectory(turn([5, 9], context=[1]), turn([6, EOS], context=[7, 7]))


def test_h07_attention_follows_lengths_and_the_loss_mask_has_holes_when_pad_and_eos_are_the_same_token():
    longer = trajectory(turn([5, 9, 8, 8], context=[1]), turn([6, EOS], context=[7, 7]), member=1)
    batch = collate([Group("t", (two_turns(), longer))])
    assert batch.tokens.tolist()[0] == [1, 5, 9, 7, 7, 6, EOS, 0, 0]
    assert batch.lengths.tolist() == [7, 9]  # the EOS is inside, the two paddings outside
    assert batch.action_mask.tolist()[0] == [False, True, True, False, False, True, True, False, False]
    assert batch.turn_index.tolist()[0] == [-1, 0, 0, -1, -1, 1, 1, -1, -1]


def test_spans_and_masks_are_derived_from_the_turns():
    episode = two_turns()
    assert episode.tokens == [1, 5, 9, 7, 7, 6, EOS]
    assert episode.action_spans() == [(1, 3), (5, 7)]
    assert episode.observation_spans() == [(0, 1), (3, 5)]
    assert episode.action_count == 4


def test_numbers_per_turn_are_spread_over_that_turns_action_tokens_only():
    batch = collate([Group("t", (two_turns(),))])
    assert batch.spread_turns([[2.0, 3.0]]).tolist() == [[0, 2, 2, 0, 0, 3, 3]]
    assert batch.spread_rows([4.0]).tolist() == [[0, 4, 4, 0, 0, 4, 4]]


def test_micro_batches_are_the_rows_in_order_with_only_padding_cut_off():
    batch = one_turn_batch([[0.0, 1.0, 2.0]], lengths=[1, 4, 2])
    parts = list(batch.chunks(2))
    assert [part.rows for part in parts] == [2, 1]
    assert parts[1].tokens.shape[1] == 4  # 2 of context and 2 of action; the whole batch is 6 wide
    assert mx.array_equal(parts[0].tokens, batch.tokens[:2])
    assert sum(int(part.action_mask.sum().item()) for part in parts) == 7
