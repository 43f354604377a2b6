import mlx.core as mx
import pytest

from mlxrl_runs.memory import limits
from mlxrl_runs.memory.meter import Meter

MIB = 1024**2


def use(mebibytes):
    mx.eval(mx.zeros((mebibytes * MIB // 4,)) + 1)


def test_every_phase_has_a_peak_of_its_own():
    meter = Meter()
    meter.begin_step()
    with meter.phase("rollout"):
        use(64)
    with meter.phase("update"):
        use(8)
    # the big phase came first and does not show in the small one's peak
    assert meter.peak_bytes["rollout"] >= 64 * MIB
    assert 8 * MIB <= meter.peak_bytes["update"] < 64 * MIB
    metrics = meter.metrics()
    assert metrics["memory/peak_bytes"] == metrics["memory/rollout_peak_bytes"]
    assert "memory/score_peak_bytes" not in metrics


def test_h18_a_spike_is_not_reported_for_ever_and_the_runs_highest_is_kept():
    meter = Meter()
    for size in (64, 4):
        meter.begin_step()
        with meter.phase("rollout"):
            use(size)
    assert meter.peak_bytes["rollout"] < 64 * MIB <= meter.highest_bytes["rollout"]


def test_a_phase_entered_twice_adds_its_seconds_and_keeps_its_higher_peak():
    meter = Meter()
    meter.begin_step()
    with meter.phase("score"):
        use(16)
    first = meter.seconds["score"]
    with meter.phase("score"):
        use(1)
    assert meter.seconds["score"] > first and meter.peak_bytes["score"] >= 16 * MIB


def test_the_cache_limit_holds_inside_and_is_put_back_after():
    before = mx.set_cache_limit(123 * MIB)
    try:
        with limits.applied_limits(0.01, None) as applied:
            assert applied["cache_limit_bytes"] == int(0.01 * limits.GIB)
            use(64)
            assert mx.get_cache_memory() <= 0.01 * limits.GIB
        assert mx.set_cache_limit(before) == 123 * MIB
    finally:
        mx.set_cache_limit(before)


@pytest.mark.parametrize(("asked", "expected"), [(None, 48 * limits.GIB), (2.0, 2 * limits.GIB)])
def test_on_a_mac_the_wired_limit_is_set_and_put_back(monkeypatch, asked, expected):
    # no Metal where this runs: a stand-in for the three calls
    set_to = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(
        mx, "device_info", lambda: {"max_recommended_working_set_size": 48 * limits.GIB, "memory_size": 64 * limits.GIB}
    )
    monkeypatch.setattr(mx, "set_wired_limit", lambda size: (set_to.append(size), 7)[1])
    with limits.applied_limits(1.0, asked) as applied:
        assert applied["wired_limit_bytes"] == expected
    assert set_to == [expected, 7]
