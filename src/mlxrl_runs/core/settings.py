"""Base of every config schema: frozen, typed, ranges checked, unknown keys refused. Imports no MLX."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Settings(BaseModel):
    """A config section. The yaml lists every key with its value; fields give type, meaning, range, and no default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Count = Annotated[Int, Field(ge=0)]
PositiveInt = Annotated[Int, Field(ge=1)]
NonNegative = Annotated[Float, Field(ge=0)]
Positive = Annotated[Float, Field(gt=0)]
UnitInterval = Annotated[Float, Field(ge=0, le=1)]
Share = Annotated[Float, Field(ge=0, lt=1)]  # [0, 1)
OpenShare = Annotated[Float, Field(gt=0, le=1)]  # (0, 1]


# Choices that algorithms share; docs/algorithms.md says what each of them means.
Reduction = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
RatioLevel = Literal["token", "turn", "sequence", "sequence_product"]
AdvantageScaling = Literal["group", "batch", "none"]
KlEstimator = Literal["k1", "k2", "k3"]
KlGradient = Literal["plain", "corrected", "k2"]
Correction = Literal["truncate", "mask"]


class Recommended(Settings):
    """What suits an environment; the run-wide keys read it by interpolation.

    Attributes: learning_rate_factor: times what suits the model.
    """

    steps: PositiveInt
    tasks_per_step: PositiveInt
    learning_rate_factor: Positive
    max_completion_tokens: PositiveInt
