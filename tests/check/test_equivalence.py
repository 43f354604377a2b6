"""How two ways of sampling are held against each other, worked by hand."""

import math

import pytest

from building import trajectory, turn
from mlxrl_runs.check.equivalence import Agreement, compare


def played(*actions):
    """An episode of turns; each action is a list of (token, log-probability)."""
    return trajectory(
        *(turn([token for token, _ in action], sampler_logp=tuple(logp for _, logp in action)) for action in actions)
    )


def test_equal_tokens_are_compared_by_their_log_probabilities_over_all_turns():
    one, other = played([(5, -1.0), (6, -2.0)], [(7, -0.5)]), played([(5, -1.25), (6, -2.0)], [(7, -0.375)])
    found = compare(one, other, [9.0, 9.0, 9.0])
    assert found == Agreement(3, (0.25, 0.0, 0.125), ())
    assert found.largest == 0.25 and found.mean == 0.125


def test_an_episode_is_compared_up_to_where_it_parts_and_the_margin_there_counts():
    one, other = played([(5, -1.0), (6, -2.0), (8, -3.0)]), played([(5, -1.0), (7, -2.5), (8, -9.0)])
    found = compare(one, other, [9.0, 0.75, 9.0])
    assert found == Agreement(2, (0.0,), (0.75,))  # what comes behind belongs to other texts
    assert found.largest == 0.75 and found.ties(0.75) == 0 and found.ties(1.0) == 1


def test_a_difference_that_is_no_number_is_the_largest():
    found = Agreement(2, (math.nan, 3.0), ()) + Agreement(1, (), (4.0,))
    assert found.tokens == 3 and math.isnan(found.largest)
    assert Agreement().largest == Agreement().mean == 0.0


def test_an_action_that_ended_earlier_in_one_of_them_parts_where_the_other_goes_on():
    # EOS against a word: the tokens differ there, so nothing behind is compared
    found = compare(played([(5, -1.0), (1, -2.0)]), played([(5, -1.0), (6, -2.0), (7, -1.0)]), [9.0, 0.5, 9.0])
    assert found.tokens == 2 and found.margins == (0.5,) and found.mean == pytest.approx(0.0)
