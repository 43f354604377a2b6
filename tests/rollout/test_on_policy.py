from building import engine_of, settings, tiny
from mlxrl_runs.rollout.on_policy import OnPolicy
from mlxrl_runs.rollout.sampling import Sampling


def experience(seed=0, tasks_per_step=5, refills=None, **changes):
    family, bounds = settings("env", "arithmetic", **changes), {"tasks_per_step": tasks_per_step, "group_size": 3}
    return OnPolicy(engine_of(tiny()), family, Sampling(), seed=seed, **bounds, refills=refills)


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


class Picky:
    """Wants groups as a list of answers says, one for each group it is first asked about."""

    def __init__(self, answers, max_refills):
        self.answers, self.max_refills, self.known = iter(answers), max_refills, {}

    def wants(self, group):
        if id(group) not in self.known:
            self.known[id(group)] = (group, next(self.answers))
        return self.known[id(group)][1]


def test_a_batch_is_refilled_until_it_is_full_and_the_cost_is_told():
    # 1 of 4 is wanted, so for 3 more 12 are sampled; then 3 of 16 are, so for 1 more 16 / 3, rounded up
    wanted = [True] + 3 * [False] + 2 * [True] + 10 * [False] + 5 * [False] + [True]
    picky = Picky(wanted, max_refills=8)
    sampled = experience(tasks_per_step=4, refills=picky).sample(1)
    assert len(sampled.kept) == 4 and all(map(picky.wants, sampled.kept))
    assert (sampled.refills, len(sampled.groups)) == (2, 22)
    unused = sum(row.action_count for g in sampled.groups if g not in sampled.kept for row in g.trajectories)
    assert sampled.unused_tokens == unused > 0
    assert sampled.sampled_tokens == unused + sum(row.action_count for g in sampled.kept for row in g.trajectories)


def test_rounds_of_sampling_come_to_an_end_and_draw_afresh():
    sampled = experience(tasks_per_step=4, refills=Picky([False] * 12, max_refills=2)).sample(1)
    assert sampled.kept == [] and sampled.refills == 2
    tasks = [group.task for group in sampled.groups]
    assert len(set(tasks)) > 4  # a round that asked the same again would learn nothing


def test_a_refill_is_bounded_and_decodes_no_more_rows_at_once_than_a_step(monkeypatch):
    source, seen = experience(tasks_per_step=8, refills=Picky([True] + 7 * [False] + 100 * [False], 1)), []
    play = source._engine.play
    monkeypatch.setattr(
        source._engine, "play", lambda *given, rows: seen.append((len(given[0]), rows)) or play(*given, rows=rows)
    )
    source.sample(1)  # 1 of 8: for 7 more 56 would be needed, and 4 batches are the most
    assert seen == [(8 * 3, 8 * 3), (32 * 3, 8 * 3)]


def test_a_nearly_full_batch_asks_for_as_much_as_it_is_likely_to_need():
    # 3 of 4 were wanted: for one more, two are sampled (4 / 3, rounded up)
    sampled = experience(tasks_per_step=4, refills=Picky([True, True, True, False, True, True], max_refills=1)).sample(
        1
    )
    assert len(sampled.groups) == 6 and len(sampled.kept) == 4
