"""The numbers of one step, under the names that docs/metrics.md defines."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxrl_runs import maths
from mlxrl_runs.core.batch import Batch
from mlxrl_runs.core.trajectory import Group, StopReason
from mlxrl_runs.maths.scalars import number
from mlxrl_runs.training.update import UpdateReport, norm_name

Metrics = dict[str, float]


def experience_metrics(groups: Sequence[Group]) -> Metrics:
    """reward/*, group/*, completion/* and turns/mean of what was rolled out."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    returns = [trajectory.total_reward for trajectory in trajectories]
    lengths = [len(turn.action) for turn in turns]
    parts = sorted({name for turn in turns for name in turn.reward_parts})
    return {
        "reward/mean": sum(returns) / len(returns),
        "reward/std": maths.baselines.sample_std(returns),
        "reward/success": sum(trajectory.success for trajectory in trajectories) / len(trajectories),
        **{
            f"reward/{part}": sum(turn.reward_parts.get(part, 0.0) for turn in turns) / len(trajectories)
            for part in parts
        },
        "group/zero_std_fraction": sum(not group.has_spread for group in groups) / len(groups),
        "completion/length_mean": sum(lengths) / len(lengths),
        "completion/length_max": max(lengths),
        "completion/truncated_fraction": sum(turn.stop is StopReason.LENGTH for turn in turns) / len(turns),
        "completion/eos_fraction": sum(turn.stop is StopReason.EOS for turn in turns) / len(turns),
        "completion/empty_fraction": sum(not turn.text for turn in turns) / len(turns),
        "turns/mean": len(turns) / len(trajectories),
    }


def advantage_metrics(batch: Batch) -> Metrics:
    """advantage/{mean,std,min,max} over action tokens."""
    assert batch.advantage is not None
    mask, count = batch.action_mask, mx.maximum(batch.action_mask.sum(), 1)
    mean = mx.where(mask, batch.advantage, 0.0).sum() / count
    deviation = mx.where(mask, batch.advantage - mean, 0.0)
    return {
        "advantage/mean": number(mean),
        "advantage/std": number(mx.sqrt(deviation.square().sum() / mx.maximum(count - 1, 1))),
        "advantage/min": number(mx.where(mask, batch.advantage, mx.inf).min()),
        "advantage/max": number(mx.where(mask, batch.advantage, -mx.inf).max()),
    }


def update_metrics(batch: Batch, report: UpdateReport) -> Metrics:
    """loss/*, grad/*, policy/entropy, mismatch/*, and kl/reference, echo/*, ratio/* where they were asked for."""
    logp = report.outputs.logp if batch.old_logp is None else batch.old_logp
    token_mean = maths.objective.token_mean_of
    metrics = {
        **{f"loss/{name}": value for name, value in report.losses.items()},
        "loss/total": sum(report.losses.values()),
        **{norm_name(name): norm for name, norm in report.grad_norms.items()},
        "policy/entropy": token_mean(report.outputs.entropy, batch.action_mask),
        "optimizer/learning_rate": report.learning_rate,
        **maths.mismatch.gap(logp, batch.sampler_logp, batch.action_mask),
        **report.ratio_metrics,
        **({} if report.stopped_early is None else {"update/stopped_early": float(report.stopped_early)}),
    }
    if batch.reference_logp is not None:
        kl = maths.divergence.k3(logp, batch.reference_logp)
        metrics["kl/reference"] = token_mean(kl, batch.action_mask)
    if batch.observation_weights is not None:
        metrics["echo/cross_entropy"] = -token_mean(report.outputs.logp, batch.observation_mask)
        metrics["echo/accuracy"] = token_mean(report.outputs.is_likeliest, batch.observation_mask)
    return metrics


def evaluation_metrics(evaluation: dict[str, dict[str, Any]]) -> Metrics:
    """eval/<policy>_<score> of one evaluation, the parts of its reward among them."""
    return {
        f"eval/{policy}_{name}": value
        for policy, score in evaluation.items()
        for name, value in {**score.get("parts", {}), "success": score["success"], "reward": score["reward"]}.items()
    }
