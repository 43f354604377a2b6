"""Gets MLX ready before its first import: a fast BLAS on Linux CPUs, and a plain word when there is no backend."""

import ctypes
import ctypes.util
import glob
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version

from mlxrl_runs.errors import MlxrlError

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
SHARED_BLAS_FROM = 256  # hidden size under which matrix products are too small to be shared between threads
NO_BLAS_WARNING = (
    "No fast BLAS found: MLX on this CPU will be about 16 times slower. "
    "Install one: `apt-get install libopenblas0-pthread` (Debian, Ubuntu) or `pip install 'mlxrl-runs[blas]'` (x86-64)."
)
LATE_WARNING = (
    "MLX was imported before its fast BLAS was loaded, and will be about 16 times slower on this CPU. "
    "Start Python anew, with `from mlxrl_runs import train` above the first `import mlx`."
)
SLOW_GIGAFLOPS = 12.0  # MLX's own BLAS reaches 6 of them, OpenBLAS on 2 busy cores 80


@dataclass(frozen=True)
class Backend:
    """What MLX will compute with.

    Attributes:
        name: metal, cuda or cpu.
        blas: the library that multiplies matrices on a Linux CPU; None where MLX brings its own.
        warning: something a person can act on, or None.
    """

    name: str
    blas: str | None = None
    warning: str | None = None


def prepare() -> Backend:
    """Load what MLX needs and say what was found. Call before anything imports `mlx.core`.

    Raises: MlxrlError when no MLX backend is installed, naming the extra that brings one.
    """
    if sys.platform == "darwin":
        return Backend("metal")
    if any(_installed(f"mlx-cuda-{generation}") for generation in (12, 13)):
        return Backend("cuda")
    if not _installed("mlx-cpu"):
        raise MlxrlError(
            "MLX has no backend on this machine. Install one: `pip install 'mlxrl-runs[cpu]'`, "
            "or `[cuda12]` / `[cuda13]` for an NVIDIA GPU."
        )
    blas = _load_blas()
    if blas is None:
        return Backend("cpu", warning=NO_BLAS_WARNING)
    # MLX binds its BLAS where it is imported: one that is loaded later is not used
    late = "mlx.core" in sys.modules and gigaflops(512) < SLOW_GIGAFLOPS
    return Backend("cpu", blas=blas, warning=LATE_WARNING if late else None)


def gigaflops(size: int, repeats: int = 3) -> float:
    """GFLOP/s of a product of two float32 matrices of `size` rows: the best of `repeats`, after one that warms up."""
    import mlx.core as mx

    left, right = mx.ones((size, size)), mx.ones((size, size))
    mx.eval(left @ right)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        mx.eval(left @ right)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds) / 1e9


def use_blas_threads(backend: Backend, count: int) -> bool:
    """Let the BLAS of a Linux CPU use `count` threads; True when it could be told.

    Small products lose by being shared out, and lose most on a busy machine: with 2 threads on 2 busy cores a rollout
    of the tiny model took twice as long as with 1. A count set by OPENBLAS_NUM_THREADS and the like stays.
    """
    if backend.blas is None or any(name in os.environ for name in THREAD_VARIABLES):
        return False
    library = ctypes.CDLL(backend.blas)
    for function in ("openblas_set_num_threads", "MKL_Set_Num_Threads"):
        if hasattr(library, function):
            getattr(library, function)(ctypes.c_int(count))
            return True
    return False


def blas_threads(backend: Backend) -> int | None:
    """How many threads the BLAS of a Linux CPU uses; None where MLX brings its own."""
    if backend.blas is None:
        return None
    library = ctypes.CDLL(backend.blas)
    for function in ("openblas_get_num_threads", "MKL_Get_Max_Threads"):
        if hasattr(library, function):
            return int(getattr(library, function)())
    return None


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _load_blas() -> str | None:
    # MLX's Linux wheel carries the reference BLAS (5.6 GFLOP/s on a 1024 GEMM). Symbols already in the global scope win
    # over it: with OpenBLAS there the same product runs at 290 GFLOP/s.
    for candidate in _blas_candidates():
        try:
            library = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if hasattr(library, "cblas_sgemm"):  # builds with prefixed or suffixed names do not serve
            return candidate
    return None


def _blas_candidates() -> Iterator[str]:
    """The system's OpenBLAS, one in a conda environment, then MKL from PyPI (it finds its other parts by itself)."""
    if found := ctypes.util.find_library("openblas"):
        yield found
    yield from glob.glob(f"{sys.prefix}/lib/libopenblas.so*")
    try:
        files = distribution("mkl").files or []
    except PackageNotFoundError:
        return
    yield from (os.path.realpath(file.locate()) for file in files if file.name.startswith("libmkl_rt.so"))
