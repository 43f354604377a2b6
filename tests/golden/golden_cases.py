"""Reading the reference numbers: which files are known, what a case holds, how close is close enough."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(os.environ.get("GOLDEN_DIR") or Path(__file__).parent / "data")

STILL_TO_COME = {
    "preference_cpo_simpo_trl",
    "preference_dpo_trl",
    "preference_kto_trl",
    "preference_online_dpo_trl",
    "preference_orpo_cpo_full_trl",
    "preference_orpo_odds_trl",
    "reward_model_trl",
}

# How the peer saw its own groups; its rounding can flip the second.
INFORMATIVE = {"std_used", "is_std_zero"}
EXACT = {"keep_indices", "step_group"}
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Case:
    """One input with the peer's answer; numbers written as text (NaN, Infinity) are numbers here."""

    file: str
    name: str
    inputs: dict[str, Any]
    config: dict[str, Any]
    expected: dict[str, Any]
    tags: frozenset[str]
    has_nonfinite: bool

    def settings(self, *known: str) -> dict[str, Any]:
        """The config, once every key of it is known to the caller: a setting that nobody reads is not tested."""
        unknown = self.config.keys() - set(known)
        assert not unknown, f"{self.file}::{self.name} has settings nobody reads: {sorted(unknown)}"
        assert self.config.get("ddof", 1) == 1, "only the sample std is in use"
        return self.config


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def target_cases(path: Path) -> Iterator[Case]:
    """Every case of the file but the optional ones."""
    for case in json.loads(path.read_text())["cases"]:
        tags = frozenset(case.get("tags", ()))
        if "extra" not in tags:
            yield Case(
                file=path.stem,
                name=case["name"],
                inputs=_numbers(case["inputs"]),
                config=_numbers(case["config"]),
                expected=_numbers({**case["expected"], **case.get("product_expected", {})}),
                tags=tags,
                has_nonfinite=bool(case.get("has_nonfinite")),
            )


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def tolerance(case: Case, field: str) -> tuple[float, float]:
    """(rtol, atol) of the table in data/README.md, the special rows before the general one."""
    if field in EXACT or field.startswith(("clip_", "cispo_clip_")):
        return 0.0, 1e-6
    if case.file == "gigpo_verl_agent":
        return 1e-4, 2e-5
    if case.file == "logprobs_entropy":
        return (1e-4, 3e-4) if case.name.startswith("edge") else (1e-5, 1e-5)
    if case.file == "lora_peft" and field.startswith("grad_"):
        return 1e-5, 1e-5
    if "log_ratio" in case.name:
        return 1e-4, 1e-6
    if "tiny_variance" in case.name:
        return 1e-3, 1e-3
    return 1e-5, 1e-6


def assert_close(case: Case, field: str, got: Any) -> None:
    want = np.array(case.expected[field], dtype=np.float64)
    have = np.array(got, dtype=np.float64)
    assert have.shape == want.shape, f"{field}: shape {have.shape}, wanted {want.shape}"
    if "all_equal" in case.name and field == "advantages" and not have.any():
        return  # exactly 0 is right; the peer may show what its mean's rounding left
    want = _as_float32_can(case, want)
    declined = np.isnan(want) & case.has_nonfinite
    agreed = np.isclose(have, want, *tolerance(case, field))
    passed = np.where(declined, np.isfinite(have), agreed)
    assert passed.all(), f"{field}: got {have[~passed]}, wanted {want[~passed]}"


def _as_float32_can(case: Case, want: np.ndarray) -> np.ndarray:
    """Beyond float32's range the right answer is infinity, in cases made to go there."""
    too_large = np.abs(want) > LARGEST_FLOAT32
    return np.where(too_large, np.copysign(np.inf, want), want) if "extreme" in case.tags else want
