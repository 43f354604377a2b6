"""Adam and AdamW with warm-up and a schedule; the learning rate is a pure function of the optimizer step."""

import math
from dataclasses import dataclass

import mlx.optimizers as optim


@dataclass(frozen=True)
class LearningRate:
    """Warm-up from 0, then constant, linear or cosine down to `final_ratio` of the peak.

    Attributes:
        peak: the rate after warm-up.
        warmup_steps, total_steps: in optimizer steps.
    """

    peak: float
    schedule: str
    warmup_steps: int
    total_steps: int
    final_ratio: float

    def at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        done = min((step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1), 1.0)
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.peak * (self.final_ratio + (1 - self.final_ratio) * left)


def make_optimizer(name: str, *, betas: tuple[float, float], eps: float, weight_decay: float = 0.0) -> optim.Optimizer:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) or AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), bias corrected.

    mlx leaves the bias correction out by default, which makes the first steps less than half as long.
    """
    shared = {"learning_rate": 0.0, "betas": list(betas), "eps": eps, "bias_correction": True}
    return optim.Adam(**shared) if name == "adam" else optim.AdamW(weight_decay=weight_decay, **shared)
