"""From a case's json to the product's functions and back: one adapter a file, no formula of its own."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from golden_cases import Case

from mlxrl_runs import maths

Answer = dict[str, Any]
DUAL_CLIP = 3.0  # verl's, where a case does not say


def grpo_trl(case: Case) -> Answer:
    config = case.settings("algorithm", "group_size", "scale_rewards", "aggregation", "reward_weights", "eps", "ddof")
    assert config["algorithm"] == "grpo"
    rewards, weights, eps = case.inputs["rewards_per_func"], config["reward_weights"], config["eps"]
    groups = _runs_of(config["group_size"], len(rewards))
    if config["aggregation"] == "normalize_then_sum":
        return {"advantages": maths.baselines.normalize_then_sum(rewards, weights, groups, eps)}
    assert config["aggregation"] == "sum_then_normalize"
    returns = maths.baselines.combine_rewards(rewards, weights)
    return {"advantages": maths.baselines.group_advantage(returns, groups, config["scale_rewards"], eps)}


def rloo_trl(case: Case) -> Answer:
    config = case.settings(
        "algorithm", "group_size", "normalize_advantages", "reward_clip_range", "beta", "reward_weights", "eps", "ddof"
    )
    assert config["algorithm"] == "rloo"
    returns = maths.baselines.combine_rewards(case.inputs["rewards_per_func"], config["reward_weights"])
    if config["reward_clip_range"]:
        returns = maths.baselines.clip_returns(returns, *config["reward_clip_range"])
    if config["beta"]:
        kl = maths.divergence.sequence_k1(
            _array(case, "old_per_token_logps"), _array(case, "ref_per_token_logps"), _array(case, "completion_mask")
        )
        returns = maths.baselines.penalized_returns(returns, kl.tolist(), config["beta"])
    groups = _runs_of(config["group_size"], len(returns))
    if config["normalize_advantages"]:
        return {"advantages": maths.baselines.leave_one_out_normalized(returns, groups, config["eps"])}
    return {"advantages": maths.baselines.leave_one_out(returns, groups)}


def advantages_verl(case: Case) -> Answer:
    config = case.settings("estimator", "norm_adv_by_std", "epsilon", "ddof", "gamma", "whiten_eps")
    estimator, mask = config["estimator"], _array(case, "response_mask")
    if estimator == "reinforce_plus_plus":
        returns = maths.returns.token_returns(_array(case, "token_level_rewards"), mask, config["gamma"])
        return {"returns": returns, "advantages": maths.reduction.whiten(returns, mask, config["whiten_eps"])}
    per_row = _row_advantages(estimator, config, case)
    advantages = maths.reduction.masked(mx.broadcast_to(mx.array(per_row)[:, None], mask.shape), mask)
    if estimator == "reinforce_plus_plus_baseline":
        advantages = maths.reduction.whiten(advantages, mask, config["whiten_eps"])
    return {"returns": advantages, "advantages": advantages}


def _row_advantages(estimator: str, config: dict[str, Any], case: Case) -> list[float]:
    returns, groups = [sum(row) for row in case.inputs["token_level_rewards"]], case.inputs["index"]
    if estimator in ("rloo", "rloo_vectorized"):
        return maths.baselines.leave_one_out(returns, groups)
    if estimator == "reinforce_plus_plus_baseline":
        return maths.baselines.group_advantage(returns, groups, "none")
    assert estimator in ("grpo", "grpo_vectorized"), f"unknown estimator {estimator}"
    scaling = "group" if config.get("norm_adv_by_std", True) else "none"
    return maths.baselines.group_advantage(returns, groups, scaling, config["epsilon"])


def dapo_filter(case: Case) -> Answer:
    rewards, group_size = case.inputs["rewards"], case.settings("group_size")["group_size"]
    return {"keep_indices": maths.baselines.keep_mixed_groups(rewards, _runs_of(group_size, len(rewards)))}


def gigpo_verl_agent(case: Case) -> Answer:
    config = case.settings("mode", "omega", "gamma", "epsilon", "ddof", "episode_statistics")
    scaling = {"mean_norm": "none", "mean_std_norm": "group"}[config["mode"]]
    rows = case.inputs["rows"]
    names = list(dict.fromkeys((row["uid"], row["traj"]) for row in rows))
    places = [_places_in_order(rows, name) for name in names]  # row numbers of each trajectory's steps
    rewards = [[rows[place]["reward"] for place in steps] for steps in places]

    def by_row(per_trajectory: list[list[float]]) -> list[float]:
        found = {
            place: value
            for steps, values in zip(places, per_trajectory, strict=True)
            for place, value in zip(steps, values, strict=True)
        }
        return [found[place] for place in range(len(rows))]

    step_returns = by_row([maths.returns.discounted_returns(steps, config["gamma"]) for steps in rewards])
    groups = maths.anchors.step_groups([row["uid"] for row in rows], [row["anchor"] for row in rows])
    step = maths.anchors.step_advantage(step_returns, groups, scaling, config["epsilon"])
    answer: Answer = {
        "step_returns": step_returns,
        "step_group": groups,
        "step_advantages": step,
        "episode_returns": by_row([[sum(steps)] * len(steps) for steps in rewards]),
    }
    owner = [number for number, steps in enumerate(places) for _ in steps]
    step_in_order = [step[place] for steps in places for place in steps]
    for statistics, suffix in (("step", ""), ("trajectory", "_per_trajectory_stats")):
        episode = maths.anchors.episode_advantage(
            [sum(steps) for steps in rewards],
            [task for task, _ in names],
            [len(steps) for steps in places],
            scaling,
            statistics,
            config["epsilon"],
        )
        joint = maths.anchors.joint_advantage(episode, step_in_order, owner, config["omega"])
        answer["episode_advantages" + suffix] = by_row(
            [[value] * len(steps) for value, steps in zip(episode, places, strict=True)]
        )
        answer["joint_row_advantages" + suffix] = by_row(joint)
    mask = mx.array([row["mask"] for row in rows])
    per_row = mx.array(answer["joint_row_advantages"])[:, None]
    answer["joint_advantages"] = maths.reduction.masked(mx.broadcast_to(per_row, mask.shape), mask)
    return answer


def _places_in_order(rows: list[dict[str, Any]], name: tuple[str, str]) -> list[int]:
    mine = [place for place, row in enumerate(rows) if (row["uid"], row["traj"]) == name]
    return sorted(mine, key=lambda place: rows[place]["step"])


def kl(case: Case) -> Answer:
    config = case.settings("estimator", "clamp")
    reference = _array(case, "ref_logps")

    def estimate(logp: mx.array) -> mx.array:
        return _kl_estimate(config["estimator"], config["clamp"], logp, reference, case)

    return {"kl": estimate(_array(case, "logps")), "grad_logps": _slope(estimate, _array(case, "logps"))}


def _kl_estimate(name: str, clamp: bool, logp: mx.array, reference: mx.array, case: Case) -> mx.array:
    if name.endswith("+"):
        return maths.divergence.with_k2_gradient(_kl_estimate(name[:-1], clamp, logp, reference, case), logp, reference)
    log_ratio_clamp, value_clamp = (20.0, 10.0) if clamp else (None, None)
    if name == "k3":
        return maths.divergence.k3(logp, reference, log_ratio_clamp, value_clamp)
    if name == "k3_bias_corrected":
        assert not clamp
        return maths.divergence.k3_times_ratio(logp, reference, _array(case, "old_logps"), log_ratio_clamp)
    simple = {"k1": maths.divergence.k1, "k2": maths.divergence.k2, "abs": maths.divergence.absolute}
    return simple[name](logp, reference)


def aggregation_verl(case: Case) -> Answer:
    if "shift_mean" in case.config:
        config = case.settings("shift_mean", "ddof", "eps")
        whiten = maths.reduction.whiten if config["shift_mean"] else maths.reduction.whiten_keeping_mean
        return {"whitened": whiten(_array(case, "values"), _array(case, "mask"), config["eps"])}
    config = case.settings("loss_agg_mode", "batch_num_tokens", "loss_scale_factor")
    weights = _verl_weights(config, _array(case, "mask"))

    def loss(per_token: mx.array) -> mx.array:
        return maths.reduction.weighted_sum(per_token, weights)

    return {"loss": loss(_array(case, "loss_mat")), "grad": _slope(loss, _array(case, "loss_mat"))}


def _verl_weights(config: dict[str, Any], mask: mx.array) -> mx.array:
    """verl divides by the rows that have a token."""
    rows = maths.reduction.nonempty_rows(mask)
    length = config.get("loss_scale_factor") or mask.shape[1]
    modes: dict[str, Callable[[], mx.array]] = {
        "token-mean": lambda: maths.reduction.token_mean(mask, config.get("batch_num_tokens")),
        "token-sum": lambda: maths.reduction.token_sum(mask),
        "seq-mean-token-sum": lambda: maths.reduction.sequence_sum(mask, rows),
        "seq-mean-token-mean": lambda: maths.reduction.sequence_mean(mask, rows),
        "seq-mean-token-sum-norm": lambda: maths.reduction.fixed_length(mask, length, rows),
    }
    return modes[config["loss_agg_mode"]]()


def logprobs_entropy(case: Case) -> Answer:
    temperature = case.settings("temperature")["temperature"]
    logits, labels = _array(case, "logits"), mx.array(case.inputs["labels"])

    def logp(logits: mx.array) -> mx.array:
        return maths.logprob.token_logp(logits, labels, temperature)

    def entropy(logits: mx.array) -> mx.array:
        return maths.logprob.entropy(logits, temperature)

    return {
        "logprobs": logp(logits),
        "entropy": entropy(logits),
        "grad_logprob_sum_wrt_logits": _slope(logp, logits),
        "grad_entropy_sum_wrt_logits": _slope(entropy, logits),
    }


def loss_policy_trl(case: Case) -> Answer:
    config = case.settings(
        "importance_sampling_level", "beta", "epsilon_low", "epsilon_high", "delta", "loss_type",
        "use_bias_correction_kl", "max_completion_length", "gradient_accumulation_steps", "steps_per_generation",
        "num_items_in_batch", "sapo_temperature_pos", "sapo_temperature_neg",
    )  # fmt: skip
    mask = _array(case, "mask") * (_array(case, "tool_mask") if "tool_mask" in case.inputs else 1)
    advantage = _array(case, "advantages")[:, None]
    kind, weights = config["loss_type"], _trl_weights(config, mask)
    reference = _array(case, "ref_logps") if config["beta"] else None
    at = _array(case, "logps")

    def ratio(logp: mx.array) -> mx.array:
        old = _array(case, "old_logps") if "old_logps" in case.inputs else logp
        return maths.surrogates.ratio_at(config["importance_sampling_level"], logp, old, mask, None, None)

    def kl(logp: mx.array, reference: mx.array) -> mx.array:
        corrected = "corrected" if config.get("use_bias_correction_kl") else "plain"
        # TRL multiplies by the ratio of the level in use
        return maths.divergence.estimate("k3", corrected, logp, reference, logp, None, ratio(logp))

    def loss(logp: mx.array) -> mx.array:
        per_token = _trl_policy_term(kind, config, ratio(logp), logp, advantage)
        if reference is not None:
            per_token = per_token + config["beta"] * kl(logp, reference)
        return maths.reduction.weighted_sum(per_token, weights)

    answer = {"loss": loss(at), "grad_logps": _slope(loss, at)}
    over = _trl_metric_weights(config, mask)
    if kind == "cispo":
        _, above = maths.surrogates.cap_fractions(ratio(at), 0.0, config["epsilon_high"])
        clipped = mx.where(advantage > 0, above, 0.0)  # TRL counts those with a positive advantage
        answer["cispo_clip_mean"] = maths.reduction.weighted_sum(clipped, over)
    elif kind != "sapo":
        fractions = maths.surrogates.clip_fractions(ratio(at), advantage, config["epsilon_low"], config["epsilon_high"])
        low, high = (maths.reduction.weighted_sum(where, over) for where in fractions)
        answer |= {"clip_low_mean": low, "clip_high_mean": high, "clip_region_mean": low + high}
    if reference is not None:
        token_mean = maths.reduction.token_mean(mask)
        answer["kl_mean"] = maths.reduction.weighted_sum(kl(at, reference), token_mean)
    return answer


def _trl_policy_term(
    kind: str, config: dict[str, Any], ratio: mx.array, logp: mx.array, advantage: mx.array
) -> mx.array:
    if kind == "cispo":
        return maths.surrogates.capped_surrogate(ratio, logp, advantage, 0.0, config["epsilon_high"])
    if kind == "sapo":
        temperatures = config.get("sapo_temperature_pos", 1.0), config.get("sapo_temperature_neg", 1.05)
        return maths.surrogates.gated_surrogate(ratio, advantage, *temperatures)
    assert kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), f"unknown loss_type {kind}"
    delta = config.get("delta")
    assert delta is None or delta >= 1 + config["epsilon_high"], "below that delta is no dual clip"
    return maths.surrogates.clipped_surrogate(ratio, advantage, config["epsilon_low"], config["epsilon_high"], delta)


def _trl_weights(config: dict[str, Any], mask: mx.array) -> mx.array:
    """TRL divides a micro-batch by the number of those that are accumulated."""
    kind, micro_batches = config["loss_type"], config.get("gradient_accumulation_steps", 1)
    if kind in ("dapo", "cispo"):
        steps = config.get("steps_per_generation", micro_batches)
        count = config.get("num_items_in_batch")
        return maths.reduction.token_mean(mask, count) * steps / micro_batches
    weights: dict[str, Callable[[], mx.array]] = {
        "grpo": lambda: maths.reduction.sequence_mean(mask),
        "sapo": lambda: maths.reduction.sequence_mean(mask),
        "luspo": lambda: maths.reduction.sequence_sum(mask),
        "bnpo": lambda: maths.reduction.token_mean(mask),
        "dr_grpo": lambda: maths.reduction.fixed_length(mask, config["max_completion_length"]),
    }
    return weights[kind]() / micro_batches


def _trl_metric_weights(config: dict[str, Any], mask: mx.array) -> mx.array:
    """A mean over tokens, or over rows where a row has one ratio."""
    whole_rows = config["importance_sampling_level"] == "sequence"
    return maths.reduction.sequence_mean(mask) if whole_rows else maths.reduction.token_mean(mask)


def loss_rloo_trl(case: Case) -> Answer:
    config = case.settings("epsilon_low", "epsilon_high", "objective")
    assert config["objective"] == "rloo_sequence"
    # TRL counts rows, an empty one too; ours weigh tokens. So each row gets one more, of log-ratio 0, and counts there.
    mask, old = _one_more_token(_array(case, "mask"), 1.0), _one_more_token(_array(case, "old_logps"), 0.0)
    advantage, low, high = _array(case, "advantages")[:, None], config["epsilon_low"], config["epsilon_high"]

    def loss(logp: mx.array) -> mx.array:
        ratio = maths.surrogates.ratio_at("sequence_product", _one_more_token(logp, 0.0), old, mask, None, None)
        per_row = maths.surrogates.clipped_surrogate(ratio[:, -1:], advantage, low, high)
        return maths.reduction.weighted_sum(per_row, maths.reduction.sequence_mean(mask[:, -1:]))

    return {"loss": loss(_array(case, "logps")), "grad_logps": _slope(loss, _array(case, "logps"))}


def _one_more_token(values: mx.array, value: float) -> mx.array:
    return mx.concatenate([values, mx.full((values.shape[0], 1), value)], axis=1)


def policy_loss_verl(case: Case) -> Answer:
    config = case.settings(
        "epsilon_low", "epsilon_high", "clip_ratio_c", "loss_agg_mode", "policy_loss", "batch_num_tokens",
        "loss_scale_factor", "tau_pos", "tau_neg",
    )  # fmt: skip
    mask, advantage = _array(case, "mask"), _array(case, "advantages")
    advantage = advantage[:, None] if advantage.ndim == 1 else advantage
    old, at, kind = _array(case, "old_logps"), _array(case, "logps"), config["policy_loss"]
    low, high = config["epsilon_low"], config["epsilon_high"]
    # verl gives GSPO's row ratio a slope by each token's own log-probability: the same where a row has one advantage
    assert kind != "gspo" or advantage.shape[1] == 1
    # verl's sapo averages by rows, whatever the mode
    weights = _verl_weights(config | ({"loss_agg_mode": "seq-mean-token-mean"} if kind == "sapo" else {}), mask)

    def ratio(logp: mx.array) -> mx.array:
        level, clamp = ("sequence", 10.0) if kind == "gspo" else ("token", 20.0)
        return maths.surrogates.ratio_at(level, logp, old, mask, None, clamp)

    def term(logp: mx.array) -> mx.array:
        if kind == "cispo":
            return maths.surrogates.capped_surrogate(ratio(logp), logp, advantage, 1 - low, 1 + high)
        if kind == "sapo":
            taus = config.get("tau_pos", 1.0), config.get("tau_neg", 1.05)
            return maths.surrogates.gated_surrogate(ratio(logp), advantage, *taus)
        assert kind in ("vanilla", "gspo"), f"unknown policy_loss {kind}"
        dual = None if kind == "gspo" else config.get("clip_ratio_c", DUAL_CLIP)
        return maths.surrogates.clipped_surrogate(ratio(logp), advantage, low, high, dual)

    def loss(logp: mx.array) -> mx.array:
        return maths.reduction.weighted_sum(term(logp), weights)

    def mean(per_token: mx.array) -> mx.array:
        return maths.reduction.weighted_sum(per_token, maths.reduction.token_mean(mask))

    return {
        "loss": loss(at),
        "grad_logps": _slope(loss, at),
        **{name: mean(where) for name, where in _verl_clips(kind, config, ratio(at), advantage).items()},
        "approx_kl_k1": mean(maths.surrogates.bounded_log_ratio(old, at, None if kind == "gspo" else 20.0)),
    }


def _verl_clips(kind: str, config: dict[str, Any], ratio: mx.array, advantage: mx.array) -> dict[str, mx.array]:
    nowhere = mx.zeros_like(ratio)
    if kind == "sapo":
        return {"clip_fraction": nowhere, "clip_fraction_lower": nowhere}
    low, high = config["epsilon_low"], config["epsilon_high"]
    if kind == "cispo":
        below, above = maths.surrogates.cap_fractions(ratio, 1 - low, 1 + high)
    else:
        below, above = maths.surrogates.clip_fractions(ratio, advantage, low, high)
    dual = config.get("clip_ratio_c", DUAL_CLIP)
    beyond = maths.surrogates.dual_clip_fraction(ratio, advantage, dual) if kind == "vanilla" else nowhere
    return {"clip_fraction": below + above, "clip_fraction_lower": beyond}


def ppo_value_gae_verl(case: Case) -> Answer:
    mask, values = _array(case, "mask"), _array(case, "values")
    if "gamma" in case.config:
        config = case.settings("gamma", "lam", "whiten_ddof", "whiten_eps")
        rewards = _array(case, "token_level_rewards")
        advantage, returns = maths.values.gae(rewards, values, mask, config["gamma"], config["lam"])
        whitened = maths.reduction.whiten(advantage, mask, config["whiten_eps"], config["whiten_ddof"])
        return {"advantages_raw": advantage, "returns": returns, "advantages_whitened": whitened}
    config = case.settings("cliprange_value", "loss_agg_mode", "batch_num_tokens", "loss_scale_factor")
    returns, clip, weights = _array(case, "returns"), config["cliprange_value"], _verl_weights(config, mask)

    def loss(predicted: mx.array) -> mx.array:
        return maths.reduction.weighted_sum(maths.values.clipped_value_loss(predicted, values, returns, clip), weights)

    at = _array(case, "vpreds")
    clipped = maths.values.value_clip_fraction(at, values, returns, clip)
    share = maths.reduction.weighted_sum(clipped, maths.reduction.token_mean(mask))
    return {"loss": loss(at), "grad_vpreds": _slope(loss, at), "clip_fraction": share}


def lora_peft(case: Case) -> Answer:
    """The layer the product trains is mlx-lm's; this holds it to the meaning the adapter's file has elsewhere."""
    from mlx_lm.tuner.lora import LoRALinear

    config = case.settings("rank", "alpha", "use_rslora", "mlx_lm_scale_equivalent")
    rank, weight = config["rank"], _array(case, "weight")
    scale = config["alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in case.inputs)
    linear.weight = weight
    if "bias" in case.inputs:
        linear.bias = _array(case, "bias")
    layer = LoRALinear.from_base(linear, r=rank, scale=scale)

    def forward(x: mx.array, lora_a: mx.array, lora_b: mx.array) -> mx.array:
        layer.lora_a, layer.lora_b = lora_a.T, lora_b.T
        return layer(x)

    inputs = _array(case, "x"), _array(case, "lora_A"), _array(case, "lora_B")
    upstream = _array(case, "upstream")
    grad_x, grad_a, grad_b = mx.grad(lambda *args: (forward(*args) * upstream).sum(), argnums=(0, 1, 2))(*inputs)
    answer = {"y": forward(*inputs), "scaling": layer.scale, "merged_weight": layer.fuse().weight}
    answer |= {"delta_weight": answer["merged_weight"] - weight, "grad_x": grad_x, "grad_A": grad_a, "grad_B": grad_b}
    layer.scale = 0.0
    return answer | {"y_adapter_disabled": layer(inputs[0])}


ADAPTERS: dict[str, Callable[[Case], Answer]] = {
    "advantages_grpo_trl": grpo_trl,
    "advantages_rloo_trl": rloo_trl,
    "advantages_verl": advantages_verl,
    "aggregation_verl": aggregation_verl,
    "dapo_filter": dapo_filter,
    "gigpo_verl_agent": gigpo_verl_agent,
    "kl": kl,
    "logprobs_entropy": logprobs_entropy,
    "lora_peft": lora_peft,
    "loss_policy_edge_trl": loss_policy_trl,
    "loss_policy_sequence_trl": loss_policy_trl,
    "loss_policy_token_trl": loss_policy_trl,
    "loss_rloo_trl": loss_rloo_trl,
    "policy_loss_verl": policy_loss_verl,
    "ppo_value_gae_verl": ppo_value_gae_verl,
}


def _array(case: Case, name: str) -> mx.array:
    return mx.array(case.inputs[name], dtype=mx.float32)


def _runs_of(group_size: int, rows: int) -> list[int]:
    return [row // group_size for row in range(rows)]


def _slope(function: Callable[[mx.array], mx.array], at: mx.array) -> mx.array:
    return mx.grad(lambda x: function(x).sum())(at)
