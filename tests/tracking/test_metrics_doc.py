import re
from pathlib import Path

from mlxrl_runs.tracking.names import FREE, METRICS

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"
CONTRACT = """
    reward/mean reward/std reward/<part> group/zero_std_fraction advantage/mean advantage/std advantage/min
    advantage/max advantage/episode_std advantage/step_std anchor/group_size_mean anchor/singleton_fraction
    kl/reference kl/old ratio/mean ratio/max clip/low_fraction clip/high_fraction policy/entropy grad/norm
    completion/length_mean completion/length_max completion/truncated_fraction completion/eos_fraction turns/mean
    memory/rollout_peak_bytes memory/score_peak_bytes memory/update_peak_bytes memory/active_bytes
    memory/cache_bytes memory/peak_bytes time/rollout_seconds time/env_seconds time/score_seconds
    time/update_seconds rollout/tokens_per_second update/tokens_per_second progress/episodes progress/sampled_tokens
    progress/trained_tokens progress/optimizer_updates progress/seconds
"""
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$")


def documented():
    """name -> (unit, definition, presence), from the table of docs/metrics.md."""
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    found = [ROW.match(row) for row in rows]
    assert all(found), [row for row, match in zip(rows, found, strict=True) if match is None]
    return {match[1]: tuple(cell.strip() for cell in match.groups()[1:]) for match in found}


def documented_names():
    return set(documented())


def is_documented(name):
    """True for a name of the table; `reward/<part>` stands for every reward/* that has no row of its own, and so on."""
    openings = [known.split("<")[0] for known in documented_names() if known.endswith(">")]
    return name in documented_names() or any(name.startswith(opening) for opening in openings)


def test_every_metric_has_a_row_of_its_own_with_unit_definition_and_presence():
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) == len(documented())  # no name twice
    assert all(all(cells) for cells in documented().values())


def test_names_are_area_slash_name_and_carry_their_unit():
    for name, (unit, _, _) in documented().items():
        assert re.fullmatch(r"[a-z_]+/([a-z_]+|[a-z_]*<(part|score)>)", name), name
        assert (unit == "bytes") == name.endswith("_bytes"), name
        assert (unit == "seconds") == name.endswith("seconds"), name
        assert (unit == "tokens/s") == name.endswith("_per_second"), name
        assert (unit == "share") == name.endswith(("_fraction", "success", "accuracy")), name


def test_metrics_that_one_update_a_batch_would_make_constant_are_conditional():
    for name in ("kl/old", "ratio/mean", "ratio/max", "clip/low_fraction", "clip/high_fraction"):
        assert documented()[name][2].startswith("`algorithm.updates_per_batch` or `algorithm.minibatches` > 1")


def test_the_contracts_names_are_all_there():
    assert set(CONTRACT.split()) <= documented_names()


def test_a_part_of_the_reward_is_documented_and_an_invented_name_is_not():
    assert is_documented("reward/exact") and is_documented("loss/total")
    assert not is_documented("loss/invented")


def test_the_names_the_config_knows_are_those_of_the_table():
    written_out = {name for name in documented_names() if "<" not in name}
    assert set(METRICS) == written_out and len(METRICS) == len(written_out)
    assert set(FREE) == {name.split("<")[0] for name in documented_names() if "<" in name}
