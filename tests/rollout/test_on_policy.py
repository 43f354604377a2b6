from building import engine_of, settings, tiny
from mlxrl_runs.rollout.on_policy import OnPolicy
from mlxrl_runs.rollout.sampling import Sampling


def experience(seed=0, tasks_per_step=5, **changes):
    family = settings("env", "arithmetic", **changes)
    return OnPolicy(engine_of(tiny()), family, Sampling(), seed=seed, tasks_per_step=tasks_per_step, group_size=3)


def test_a_step_has_distinct_tasks_with_all_members_of_each():
    groups = experience().sample(1).kept
    assert len({group.task for group in groups}) == 5
    assert [[row.member for row in group.trajectories] for group in groups] == [[0, 1, 2]] * 5
    assert all(row.task == group.task for group in groups for row in group.trajectories)


def test_tasks_are_a_function_of_seed_and_step():
    tasks = lambda seed, step: [group.task for group in experience(seed).sample(step).kept]
    assert tasks(0, 1) == tasks(0, 1)
    assert tasks(0, 1) != tasks(0, 2) and tasks(0, 1) != tasks(1, 1)


def test_a_task_set_smaller_than_a_step_repeats_tasks_with_draws_of_their_own():
    # 1 operand range of two: 0+0 0+1 1+0 1+1 with one operator, of which one is held out
    groups = experience(max_operand=1, operators=["+"], held_out_fraction=0.25).sample(1).kept
    assert len(groups) == 5 and len({group.task for group in groups}) == 3
    repeated = [group for group in groups if [other.task for other in groups].count(group.task) > 1]
    texts = {str([row.tokens for row in group.trajectories]) for group in repeated}
    assert len(texts) == len(repeated)
