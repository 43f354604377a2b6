"""The allocator's limits, applied for a run and put back after it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

GIB = 1024**3
CACHE_SHARE = 1 / 8  # of the memory at hand, when no limit is given


def memory_size_bytes() -> int:
    """What the device has: unified or card memory, else the machine's RAM."""
    info = mx.device_info()
    return int(info.get("memory_size") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@contextmanager
def applied_limits(cache_limit_gib: float | None, wired_limit_gib: float | None) -> Iterator[dict[str, float]]:
    """Inside, MLX's allocator keeps to these limits.

    Args:
        cache_limit_gib: freed buffers kept for reuse; None is an eighth of the memory at hand.
        wired_limit_gib: memory that stays resident, on Metal only; None is the recommended working set.
    Yields: the limits in force, in bytes.
    """
    cache_bytes = int(memory_size_bytes() * CACHE_SHARE if cache_limit_gib is None else cache_limit_gib * GIB)
    limits: dict[str, float] = {"cache_limit_bytes": cache_bytes}
    cache_before = mx.set_cache_limit(cache_bytes)
    wired_before: int | None = None
    try:
        if mx.metal.is_available():
            recommended = int(mx.device_info()["max_recommended_working_set_size"])
            wired = recommended if wired_limit_gib is None else int(wired_limit_gib * GIB)
            wired_before = mx.set_wired_limit(wired)
            limits["wired_limit_bytes"] = wired
        yield limits
    finally:
        mx.set_cache_limit(cache_before)
        if wired_before is not None:
            mx.set_wired_limit(wired_before)
