"""SAPO (Gao et al. 2025, arXiv:2511.20347): a smooth gate on the ratio in the place of a clip."""

from typing import TYPE_CHECKING, Literal

from mlxrl_runs import maths
from mlxrl_runs.core import registry
from mlxrl_runs.core.policy_gradient import PolicyGradient
from mlxrl_runs.core.settings import Positive

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxrl_runs.core.batch import Batch


@registry.algorithm("sapo")
class Sapo(PolicyGradient):
    """-A sigmoid(tau (r - 1)) 4 / tau, whose slope at r = 1 is that of -r A and fades on both sides.

    Attributes: temperature_positive, temperature_negative: tau, by the sign of A; larger fades sooner.
    """

    name: Literal["sapo"]
    temperature_positive: Positive
    temperature_negative: Positive

    def advantage(self, batch: "Batch") -> "mx.array":
        return self.group_relative(batch)

    def policy_term(self, ratio: "mx.array", logp: "mx.array", advantage: "mx.array") -> "mx.array":
        return maths.surrogates.gated_surrogate(ratio, advantage, self.temperature_positive, self.temperature_negative)
