"""`job=doctor`: what this machine offers and what is wrong with it, in one block to paste into a bug report.

Nothing is trained, no weights are read and no folder is made. Everything is asked for separately, so that what is
broken hides nothing else. No secret is read: of a login or a token only whether there is one.
"""

import locale
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from mlxrl_runs import backend as backends
from mlxrl_runs.errors import MlxrlError
from mlxrl_runs.training.run_folder import DISTRIBUTIONS, git_commit

GIB = 1024**3
LITTLE_DISK_BYTES = 5 * GIB  # checkpoints and one small model fit
LITTLE_MEMORY_BYTES = 2 * GIB
ALSO = {"transformers": "transformers", "rich": "rich", "pydantic": "pydantic"}
VARIABLES = (
    "MLX_BACKEND", "MLX_PTX_CACHE_DIR", "MLX_USE_CUDA_GRAPHS", "MLX_DISABLE_COMPILE", *backends.THREAD_VARIABLES,
    "WANDB_MODE", "WANDB_DIR", "HF_HUB_OFFLINE", "HF_HOME", "PYTHONUTF8", "LANG", "LC_ALL", "TERM", "COLUMNS",
)  # fmt: skip
PRODUCT_SIZE = 1024
PRODUCT = f"GFLOP/s, {PRODUCT_SIZE} float32"


@dataclass
class Report:
    """What was found.

    Attributes:
        facts: by section, then by name; plain numbers, texts and lists. Names of byte counts end in `_bytes`.
        problems: each with what to do about it.
    """

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def add(self, problem: str, remedy: str) -> None:
        self.problems.append((problem, remedy))


def examine(output: Path, wants_wandb: bool = True) -> Report:
    """Look at this machine. Call before anything imports `mlx.core`, so that MLX gets the BLAS a run would give it.

    Args: output: where runs would be written; wants_wandb: whether a missing login is a problem.
    """
    report = Report()
    sections: dict[str, Callable[[Report], dict[str, Any]]] = {
        "system": _system,
        "mlx": _mlx,
        "versions": _versions,
        "disk": lambda report: _disk(report, output),
        "wandb": lambda report: _wandb(report, wants_wandb),
        "hub": _hub,
        "terminal": _terminal,
        "variables": lambda report: {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    for name, look in sections.items():
        try:
            report.facts[name] = look(report)
        except Exception as error:  # whatever is broken here is what the block is for
            said = f"{type(error).__name__}: {error}"
            report.facts[name] = {"error": said}
            report.add(f"{name}: {said}", "Reinstall: pip install --force-reinstall mlxrl-runs")
    return report


def _system(report: Report) -> dict[str, Any]:
    machine = platform.machine()
    if sys.platform == "darwin" and machine != "arm64":
        report.add("This Python runs under Rosetta: MLX needs an arm64 one.", "Install Python for Apple silicon.")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _available_bytes()
    if free is not None and free < LITTLE_MEMORY_BYTES:
        report.add(f"Only {_size(free)} of memory is free.", "Close other programs, or try memory.micro_batch_size=1.")
    return {
        "os": f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.platform(),
        "machine": machine,
        "chip": _chip(),
        "cores": os.cpu_count(),
        "usable cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "memory_bytes": memory,
        "free_memory_bytes": free,
    }


def _chip() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.is_file() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()


def _available_bytes() -> int | None:
    """What new processes can have; None where the system does not tell."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def _mlx(report: Report) -> dict[str, Any]:
    try:
        backend = backends.prepare()
    except MlxrlError as error:
        problem, _, remedy = str(error).partition(". ")
        report.add(f"{problem}.", remedy)
        return {"backend": "none installed"}
    if backend.warning:
        problem, _, remedy = backend.warning.partition(". ")
        report.add(f"{problem}.", remedy)
    threads = backends.blas_threads(backend)
    facts: dict[str, Any] = {"backend": backend.name, "blas": backend.blas, "blas threads": threads}
    try:
        facts |= _device()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        report.add(f"MLX does not work: {said}", "Check the GPU's driver, or install another backend: docs/install.md")
        return facts | {"error": said}
    if backend.blas and not backend.warning and facts[PRODUCT] < backends.SLOW_GIGAFLOPS:
        remedy = "Something imports mlx.core before mlxrl_runs has loaded the BLAS; or the machine is very busy."
        report.add(f"{backend.blas} is loaded, but MLX multiplies as slowly as without it.", remedy)
    return facts


def _device() -> dict[str, Any]:
    import mlx.core as mx

    from mlxrl_runs.memory.limits import applied_limits, memory_size_bytes

    info = mx.device_info()
    with applied_limits(None, None) as limits:
        in_force = dict(limits)
    return {
        "device": str(info.get("device_name", mx.default_device())),
        "default device": str(mx.default_device()),
        "memory_bytes": memory_size_bytes(),
        "memory_limit_bytes": mx.get_memory_limit(),
        **in_force,
        PRODUCT: round(backends.gigaflops(PRODUCT_SIZE), 1),
    }


def _versions(report: Report) -> dict[str, Any]:
    for wanted, there in unmet_requirements().items():
        report.add(f"This package was made for {wanted}; installed: {there}.", f"pip install '{wanted}'")
    found: dict[str, Any] = {"python": platform.python_version()}
    for name, distribution in (DISTRIBUTIONS | ALSO).items():
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["git commit"] = git_commit() or "none: an installed package"
    return found | {"executable": sys.executable, "package": str(Path(__file__).parent)}


def unmet_requirements() -> dict[str, str]:
    """Requirements of this package that the environment does not meet, each with the version that is there instead."""
    from packaging.requirements import Requirement

    unmet = {}
    for requirement in map(Requirement, requires("mlxrl-runs") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            there = version(requirement.name)
        except PackageNotFoundError:
            there = "none"
        if there == "none" or not requirement.specifier.contains(there, prereleases=True):
            unmet[f"{requirement.name}{requirement.specifier}"] = there
    return unmet


def _disk(report: Report, output: Path) -> dict[str, Any]:
    there = next(place for place in (output, *output.parents) if place.exists())
    usage = shutil.disk_usage(there)
    if usage.free < LITTLE_DISK_BYTES:
        remedy = "Free some space, or write elsewhere: paths.output=DIR"
        report.add(f"Only {_size(usage.free)} are free at {there}.", remedy)
    writable = there.is_dir() and os.access(there, os.W_OK)
    if not writable:
        report.add(f"Runs cannot be written to {output}.", "Give a folder you can write to: paths.output=DIR")
    return {"output": str(output), "writable": writable, "free_bytes": usage.free, "size_bytes": usage.total}


def _wandb(report: Report, wanted: bool) -> dict[str, Any]:
    from mlxrl_runs.tracking.weights_and_biases import login_state

    state = login_state()
    if wanted and state == "not logged in":
        report.add("wandb is not logged in: runs stay offline.", "wandb login, or tracking=jsonl to do without")
    return {"login": state}


def _hub(report: Report) -> dict[str, Any]:
    from huggingface_hub import constants, get_token

    cache = Path(constants.HF_HUB_CACHE)
    models = sorted(cache.glob("models--*")) if cache.is_dir() else []
    return {
        "cache": str(cache),
        "models in it": len(models),
        "token": "present" if get_token() else "none",
        "offline": bool(constants.HF_HUB_OFFLINE),
    }


def _terminal(report: Report) -> dict[str, Any]:
    encoding = sys.stdout.encoding or "unknown"
    if encoding.lower().replace("-", "") != "utf8":
        report.add(f"The terminal's encoding is {encoding}: pictures are drawn in ASCII.", "export LANG=C.UTF-8")
    return {
        "encoding": encoding,
        "file names": sys.getfilesystemencoding(),
        "locale": locale.setlocale(locale.LC_CTYPE),
        "is a terminal": sys.stdout.isatty(),
        "columns": shutil.get_terminal_size().columns,
    }


# ---- as text


def block(report: Report) -> str:
    """The report, aligned, problems first."""
    lines = ["mlxrl-runs doctor", "", "problems" if report.problems else "no problems found"]
    for number, (problem, remedy) in enumerate(report.problems, start=1):
        lines += [f"  {number}. {problem}", f"     {remedy}"]
    rows = {section: _rows(facts) for section, facts in report.facts.items() if facts}
    width = max(len(label) for section in rows.values() for label, _ in section)
    for section, pairs in rows.items():
        lines += ["", section, *(f"  {label:<{width}}  {text}".rstrip() for label, text in pairs)]
    return "\n".join(lines) + "\n"


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name.removesuffix("_bytes").replace("_", " "), _shown(name, value)) for name, value in facts.items()]


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "unknown" if name.endswith("_bytes") else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _size(value) if name.endswith("_bytes") else str(value)


def _size(count: float) -> str:
    from mlxrl_runs.tracking.drawing import readable_bytes

    return readable_bytes(count)
