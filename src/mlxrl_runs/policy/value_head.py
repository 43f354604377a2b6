"""The reward still expected, read off a model's hidden states."""

import mlx.core as mx
import mlx.nn as nn

VALUE_HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """V = mean of w h over the features + b, with h of root mean square 1. It is 0 everywhere at the start.

    Of any model, however wide and whatever its last norm scales by, one step of Adam moves V by about its learning
    rate: that rate is in the reward's unit. A plain linear head at 1e-2 ran away on the shipped model.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = mx.zeros((hidden_size,))
        self.bias = mx.zeros(())

    def __call__(self, hidden: mx.array) -> mx.array:
        """Args: hidden: (..., H). Returns: (...) in the reward's unit."""
        features = mx.fast.rms_norm(hidden.astype(mx.float32), None, 1e-6)
        return (features * self.weight).mean(axis=-1) + self.bias
