"""What a fast BLAS is worth to MLX on a Linux CPU: one 1024 x 1024 float32 product with and without the one found.

python scripts/bench_blas.py [--size 1024]
"""

import argparse
import subprocess
import sys

from mlxrl_runs import backend


def rate(size: int, with_blas: bool) -> float:
    """GFLOP/s of one product, best of ten."""
    found = (backend.prepare().blas or "none found") if with_blas else "MLX's own"
    gigaflops = backend.gigaflops(size, repeats=10)
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
