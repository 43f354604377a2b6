"""Rewards for how an episode looks, beside what it achieved."""


def overlong_penalty(tokens: float, limit: float, buffer: float) -> float:
    """A growing penalty for a completion that uses up its room: 0 up to limit - buffer, then linear to -1 at limit.

        (limit - buffer - tokens) / buffer    within the last `buffer` tokens,    -1 beyond the limit

    Args:
        tokens: length of the completion.
        limit: tokens; the longest that is not simply too long.
        buffer: tokens before the limit over which the penalty grows; 0 for none up to the limit and -1 beyond.
    Returns: -1 to 0.
    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13 (soft overlong punishment).
    """
    if tokens <= limit - buffer:
        return 0.0
    return -1.0 if tokens > limit else (limit - buffer - tokens) / buffer
