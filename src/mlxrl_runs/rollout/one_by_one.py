"""The plain version: one episode after the other, mlx-lm's own caches, one token at a time. For every model family."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.maths.scalars import number
from mlxrl_runs.policy.forward import last_logits
from mlxrl_runs.rollout.episodes import Episode, EpisodeRequest, Referee
from mlxrl_runs.rollout.sampling import Sampling, draw, row_keys
from mlxrl_runs.rollout.statistics import RolloutStatistics


class SingleRow:
    """What the model keeps of one episode."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._caches = make_prompt_cache(model)

    def feed(self, tokens: Sequence[int]) -> mx.array:
        """Append tokens, at least one: (1, V), the logits behind the last."""
        return last_logits(self._model, mx.array([list(tokens)]), mx.array([len(tokens) - 1]), self._caches)


def play_one(
    model: nn.Module,
    referee: Referee,
    stop: StopRequest,
    request: EpisodeRequest,
    sampling: Sampling,
    statistics: RolloutStatistics,
) -> Episode:
    """Play one request to its end."""
    with statistics.env_time():
        episode = referee.open(request)
    row, greedy = SingleRow(model), mx.array([request.greedy])
    while episode.end is None:
        logits, keys = row.feed(episode.to_read), row_keys([episode.draws])
        while episode.action.stop is None:
            stop.raise_if_requested()
            if episode.action.tokens:
                logits = row.feed(episode.action.tokens[-1:])
            drawn = mx.array([len(episode.action.tokens)], dtype=mx.int32)
            new = draw(logits, keys, drawn, sampling, greedy, with_margin=statistics.margins is not None)
            referee.append(episode, int(number(new.tokens)), number(new.logp))
            statistics.note(request.key, None if new.margin is None else number(new.margin))
        with statistics.env_time():
            referee.settle(episode, referee.ask(episode))
    return episode
