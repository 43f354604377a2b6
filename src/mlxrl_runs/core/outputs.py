"""What a forward pass over a batch found."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True)
class TokenOutputs:
    """Numbers about the tokens of a batch, aligned with `batch.tokens`.

    Attributes:
        logp: (B, T) nats of action tokens, and of observation tokens where they were asked for; 0 elsewhere.
        entropy: (B, T) nats, of the distribution an action token was drawn from; 0 elsewhere.
        is_likeliest: (B, T) 1 where nothing is likelier than the token, at the same places as `logp`.
        values: (B, T) reward expected from before an action token on, where a value head was asked for.
        final_values: (B,) the same from behind the last token on, where that was asked for.
    """

    logp: "mx.array"
    entropy: "mx.array"
    is_likeliest: "mx.array"
    values: "mx.array | None" = None
    final_values: "mx.array | None" = None
