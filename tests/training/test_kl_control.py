"""A KL coefficient that follows the measured KL."""

import pytest

from building import settings
from mlxrl_runs.training.kl_control import KlControl


def test_the_coefficient_rises_above_the_target_and_falls_below_it():
    # 100 of 1000 episodes, error bounded at +-.2: times 1.02, then .98
    control = KlControl(0.1, 0.05, 1000.0)
    control.after_step(5.0, 100)
    assert control.coefficient == pytest.approx(0.102)
    control.after_step(0.0, 100)
    assert control.coefficient == pytest.approx(0.102 * 0.98)


def test_without_a_target_there_is_nothing_to_control():
    assert KlControl.of(settings("algorithm", "grpo", kl_coef=0.1)) is None
    control = KlControl.of(settings("algorithm", "grpo", kl_coef=0.1, kl_target=0.2, kl_horizon=500))
    assert (control.coefficient, control.target, control.horizon) == (0.1, 0.2, 500)
