import pytest

from building import engine_of, settings, tiny
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.training.evaluate import Evaluator, bounds


def evaluator(environment="arithmetic", episodes=24, rows=100, policy=None):
    family = settings("env", environment)
    return Evaluator(engine_of(policy or tiny()), family, Sampling(), seed=0, episodes=episodes, rows=rows)


def test_it_scores_at_least_the_episodes_asked_for_and_greedy_once_a_task():
    scores = evaluator(episodes=100).evaluate()  # 80 held-out problems: 2 episodes on each of 50
    assert scores["sampled"]["episodes"] == 100 and scores["greedy"]["episodes"] == 50


def test_two_evaluations_of_one_policy_are_equal_however_many_rows_share_a_batch():
    assert evaluator(rows=100).evaluate() == evaluator(rows=7).evaluate()


def test_only_held_out_tasks_are_played():
    one = evaluator()
    assert set(one._tasks) <= set(settings("env", "arithmetic").held_out_tasks())


def test_the_floor_and_the_ceiling_are_played_not_assumed():
    # 4 rooms, 4 verbs, 6 turns: at least 4 hits in 6 tries at 1/4 is .0376; 400 episodes, 3 standard errors
    family = settings("env", "recurring")
    found = bounds(engine_of(tiny()), family, family.held_out_tasks()[:400], seed=1)
    assert found["random"]["success"] == pytest.approx(0.0376, abs=0.029)
    assert found["oracle"] == {"success": 1.0, "reward": 1.75, "episodes": 400}
