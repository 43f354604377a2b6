"""What the benchmarks share: interleaved timing of several systems, the machine's own limit, the model, the table.

A system is a name and a function that does the work once. Systems of a case take turns within one process, so that a
machine that slows down slows all of them; medians are reported. Import only after `backend.prepare()`.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxrl_runs import backend
from mlxrl_runs.core.seeding import derive_seed
from mlxrl_runs.policy.chat import ChatFormat
from mlxrl_runs.policy.load import Policy, open_policy
from mlxrl_runs.rollout.engine import Decoding, RolloutEngine
from mlxrl_runs.rollout.episodes import Limits
from mlxrl_runs.tracking.drawing import readable_bytes

ADAPTER_SIZE = 0.02  # of the numbers in an adapter, so that it changes what the model says
PACKAGES = ("mlx", "mlx-lm", "inductive-mlxrl", "mlx-lm-lora")
TURN_SECONDS = 0.3  # a turn of a fast system is several rounds of its work
READ_AT_LEAST = 64 << 20  # bytes of one timed reading: long enough to be told from the start of an evaluation


# ---- timing


@dataclass(frozen=True)
class Done:
    """What a system did: how many tokens it sampled, and which, row by row, where that is to be compared."""

    tokens: int
    rows: tuple[tuple[int, ...], ...] = ()
    note: str = ""


@dataclass
class System:
    """One way to do the work of a case.

    Attributes:
        prepare: makes what does the work; what it leaves in memory counts as the system's own.
        error: why it could not be measured.
    """

    name: str
    prepare: Callable[[], Callable[[], Done]]
    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    host_shares: list[float] = field(default_factory=list)
    spent_seconds: float = 0.0
    peak_bytes: list[int] = field(default_factory=list)
    done: Done = Done(0)
    error: str | None = None
    _play: Callable[[], Done] | None = None
    _kept_bytes: int = 0

    def start(self) -> None:
        """Prepare and do the work once: kernels are compiled, buffers are made."""
        before = _settled_bytes()
        self._play = self.prepare()
        self.done = self._play()
        self._kept_bytes = _settled_bytes() - before

    def turn(self, base_bytes: int) -> None:
        """Do the work for TURN_SECONDS, or once. `base_bytes` were in use before any system was prepared."""
        assert self._play is not None
        others = _settled_bytes() - base_bytes - self._kept_bytes
        mx.reset_peak_memory()
        times, tokens, seconds = 0, 0, 0.0
        host, started = time.thread_time(), time.perf_counter()
        while seconds < TURN_SECONDS:
            self.done = self._play()
            mx.synchronize()
            times, tokens, seconds = times + 1, tokens + self.done.tokens, time.perf_counter() - started
        self.host_shares.append((time.thread_time() - host) / seconds)
        self.seconds.append(seconds / times)
        self.rates.append(tokens / seconds)
        self.spent_seconds += seconds
        self.peak_bytes.append(mx.get_peak_memory() - others)

    def attempt(self, action: Callable[[], None]) -> None:
        """Do it, or keep in `error` what went wrong, so that the other systems are still measured."""
        try:
            action()
        except ModuleNotFoundError as error:
            self.error = f"not installed: {error.name}"
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}".splitlines()[0]

    def result(self) -> dict[str, Any]:
        if self.error is not None:
            return {"name": self.name, "error": self.error}
        return {
            "name": self.name,
            "tokens": self.done.tokens,
            "seconds": statistics.median(self.seconds),
            "tokens_per_second": statistics.median(self.rates),
            "milliseconds_per_token": 1000 / statistics.median(self.rates),
            "spread": (max(self.rates) - min(self.rates)) / statistics.median(self.rates),
            "host_share": statistics.median(self.host_shares),
            "peak_bytes": max(self.peak_bytes),
            "repeats": len(self.rates),
            "note": self.done.note,
        }


def _settled_bytes() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def chosen(systems: Sequence[System], names: Sequence[str]) -> list[System]:
    """Those of these names; all where none are given."""
    return [system for system in systems if not names or system.name in names]


def take_turns(systems: Sequence[System], repeats: int, patience_seconds: float) -> None:
    """Every system once untimed, then all of them in turn, `repeats` times.

    A system that has taken `patience_seconds` already is not repeated further.
    """
    base = _settled_bytes()
    for system in systems:
        system.attempt(system.start)
    for _ in range(repeats):
        for system in systems:
            if system.error is None and system.spent_seconds <= patience_seconds:
                system.attempt(lambda system=system: system.turn(base))


def with_ratios(results: Sequence[dict[str, Any]], to: Mapping[str, str], ours: str) -> list[dict[str, Any]]:
    """Each result with how many times as fast it is as others, and how many times as fast ours is.

    Args: to: column -> name of the system compared with. ours: name of our system.
    """
    rates = {result["name"]: result["tokens_per_second"] for result in results if "error" not in result}

    def ratios(own: float) -> dict[str, float]:
        found = {column: own / rates[name] for column, name in to.items() if name in rates}
        return found | ({"ours_to_it": rates[ours] / own} if ours in rates else {})

    return [result | (ratios(rates[result["name"]]) if result["name"] in rates else {}) for result in results]


# ---- the machine's own limit


def waiting_share() -> float:
    """Share of a wait for the device that the waiting thread itself is on the CPU; `host_share` is blind near 1."""
    size, seconds, host = 512, 0.0, 0.0
    while seconds < 0.05 and size <= 16_384:
        left = mx.random.normal((size, size))
        mx.eval(left @ left)
        began, started = time.thread_time(), time.perf_counter()
        mx.eval(left @ left)
        host, seconds = time.thread_time() - began, time.perf_counter() - started
        size *= 2
    return host / seconds


def matmul_rate(dtype: mx.Dtype) -> float:
    """FLOP/s of a large product in `dtype`: the best of three."""
    size = 1024 if mx.default_device() == mx.cpu else 8192
    left = mx.random.normal((size, size)).astype(dtype)
    mx.eval(left @ left)
    return 2 * size**3 / min(_seconds(lambda: mx.eval(left @ left)) for _ in range(3))


def reading_rate(size: int, dtype: mx.Dtype) -> float:
    """Bytes a second at which `size` bytes are read: by a sum or by a product with one row, whichever is faster."""
    width = 1024
    matrix = mx.random.normal((max(size // dtype.size // width, 1), width)).astype(dtype)
    row = mx.random.normal((1, matrix.shape[0])).astype(dtype)
    times = math.ceil(READ_AT_LEAST / matrix.nbytes)
    ways = (lambda: [matrix.sum() for _ in range(times)], lambda: [row @ matrix for _ in range(times)])
    mx.eval(matrix, row, [way() for way in ways])
    return matrix.nbytes * times / min(_seconds(lambda way=way: mx.eval(way())) for way in ways for _ in range(3))


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Limit:
    """What the machine can do at best with one model, from rates measured in this run.

    Attributes:
        weight_bytes: read once for each step of a decode, however many rows it has.
        context_bytes: keys and values of one token of one row.
        multiplied: weights that every token is multiplied with, tied output head included.
    """

    weight_bytes: int
    context_bytes: int
    multiplied: int
    bytes_per_second: float
    flops_per_second: float

    def decode_rate(self, rows: int, context: float) -> float:
        """Tokens a second of `rows` rows that have read `context` tokens each: reading and products fully overlapped.

        One step reads all weights and all keys and values once, and takes 2 FLOP for each weight and row. Attention's
        own products, norms and sampling are left out, so nothing can be faster.
        """
        reading = (self.weight_bytes + rows * context * self.context_bytes) / self.bytes_per_second
        multiplying = 2 * self.multiplied * rows / self.flops_per_second
        return rows / max(reading, multiplying)

    def record(self) -> dict[str, Any]:
        return {**self.__dict__, "waiting_share": waiting_share()}


def measured_limit(policy: Policy) -> Limit:
    """The limit of this machine for a dense decoder."""
    config, weights = policy.config, dict(tree_flatten(policy.model.parameters()))
    weights = {name: array for name, array in weights.items() if "lora" not in name}  # an adapter can be merged
    weight_bytes = sum(array.nbytes for array in weights.values())
    dtype = mx.bfloat16 if any(array.dtype == mx.bfloat16 for array in weights.values()) else mx.float32
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim, kv_heads = config.get("head_dim", hidden // heads), config.get("num_key_value_heads", heads)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * config["intermediate_size"]
    return Limit(
        weight_bytes=weight_bytes,
        context_bytes=2 * config["num_hidden_layers"] * kv_heads * head_dim * dtype.size,
        multiplied=config["num_hidden_layers"] * layer + hidden * config["vocab_size"],
        bytes_per_second=reading_rate(weight_bytes, dtype),
        flops_per_second=matmul_rate(dtype),
    )


# ---- the model


def opened(source: str, shape: str, precision: str, adapter: str) -> Policy:
    """A policy to measure; an adapter's numbers are drawn, so that leaving it out or merging it would show."""
    policy = open_policy(
        source=source, path=None, shape=shape, adapter=adapter, seed=0, keep_reference=False, rank=16,
        precision=precision,
    )  # fmt: skip
    for number, (name, array) in enumerate(tree_flatten(policy.model.trainable_parameters())):
        if name.endswith("lora_b"):
            key = mx.random.key(derive_seed(0, "bench", number))
            noise = ADAPTER_SIZE * mx.random.normal(array.shape, key=key).astype(array.dtype)
            policy.model.load_weights([(name, noise)], strict=False)
    mx.eval(policy.model.parameters())
    return policy


def engine_of(policy: Policy, limits: Limits, **options: Any) -> RolloutEngine:
    """Our engine as a run makes it. Args: options: fields of `Decoding` that are to be other than a run's."""
    decoding = Decoding(**{"compile_when": "auto", "merge_adapter": "auto", "tune": "auto"} | options)
    return RolloutEngine(policy.model, ChatFormat(policy.tokenizer), policy.eos_ids, limits, decoding)


# ---- what comes out


def surroundings(found: backend.Backend) -> dict[str, Any]:
    """When and where: what a figure means nothing without."""
    return {
        "made_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "backend": found.name,
        "device": mx.device_info().get("device_name"),
        "blas_threads": backend.blas_threads(found),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "tokens_per_second": ("tokens/s", lambda value: f"{value:,.0f}"),
    "milliseconds_per_token": ("ms/token", lambda value: f"{value:.3f}"),
    "seconds": ("seconds", lambda value: f"{value:.3g}"),
    "to_batch_generator": ("x BatchGenerator", lambda value: f"{value:.2f}"),
    "to_one_by_one": ("x one by one", lambda value: f"{value:.2f}"),
    "ours_to_it": ("ours is x", lambda value: f"{value:.2f}"),
    "peak_bytes": ("peak", readable_bytes),
    "host_share": ("host", lambda value: f"{value:.0%}"),
    "spread": ("spread", lambda value: f"{value:.0%}"),
}


def table(results: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A Markdown table, one system a line; a system that could not be measured says why."""
    lines = ["| | " + " | ".join(COLUMNS[column][0] for column in columns) + " | |", "|---" * (len(columns) + 2) + "|"]
    for result in results:
        cells = [COLUMNS[column][1](result[column]) if column in result else "" for column in columns]
        lines.append(f"| {result['name']} | " + " | ".join(cells) + f" | {result.get('error') or result['note']} |")
    return "\n".join(lines)
