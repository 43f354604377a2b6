"""What a fast BLAS is worth to MLX on a Linux CPU: one 1024 x 1024 float32 product with and without the one found.

python scripts/bench_blas.py [--size 1024]
"""

import argparse
import subprocess
import sys
import time


def rate(size: int, with_blas: bool) -> float:
    """GFLOP/s of one product, best of ten."""
    found = "MLX's own"
    if with_blas:
        from mlxrl_runs import backend

        found = backend.prepare().blas or "none found"
    import mlx.core as mx

    left, right = mx.random.normal((size, size)), mx.random.normal((size, size))
    mx.eval(left @ right)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        mx.eval(left @ right)
        seconds.append(time.perf_counter() - started)
    gigaflops = 2 * size**3 / min(seconds) / 1e9
    print(f"{gigaflops:8.1f} GFLOP/s  {found}")
    return gigaflops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--one", choices=["with", "without"], help="measure one of the two in this process")
    arguments = parser.parse_args()
    if arguments.one:
        rate(arguments.size, arguments.one == "with")
        return
    for one in ("without", "with"):  # a BLAS that was loaded stays: each has a process of its own
        command = [sys.executable, __file__, "--size", str(arguments.size), "--one", one]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
