"""The names in metrics.jsonl, as docs/metrics.md defines them. Imports no MLX."""

# What begins so has a name of the run's own behind it: a part of its reward, or a score.
FREE = ("reward/", "eval/sampled_", "eval/greedy_", "warm_start/")
_WRITTEN_OUT = """
    reward/mean reward/std reward/success reward/overlong group/zero_std_fraction advantage/mean advantage/std
    advantage/min advantage/max advantage/episode_std advantage/step_std anchor/group_size_mean
    anchor/singleton_fraction kl/reference kl/old kl/coef ratio/mean ratio/max clip/low_fraction clip/high_fraction
    clip/dual_fraction mismatch/mean mismatch/max mismatch/kl refill/rounds refill/sampled_groups refill/kept_groups
    refill/unused_tokens value/mean value/return_mean value/explained_variance echo/cross_entropy echo/accuracy
    policy/entropy loss/total loss/policy loss/kl loss/entropy loss/echo loss/value grad/norm grad/value_norm
    optimizer/learning_rate update/skipped update/stopped_early completion/length_mean completion/length_max
    completion/truncated_fraction completion/eos_fraction completion/empty_fraction turns/mean
    memory/rollout_peak_bytes memory/score_peak_bytes memory/update_peak_bytes memory/active_bytes
    memory/cache_bytes memory/peak_bytes time/rollout_seconds time/env_seconds time/score_seconds
    time/update_seconds rollout/tokens_per_second update/tokens_per_second progress/episodes progress/sampled_tokens
    progress/trained_tokens progress/optimizer_updates progress/seconds eval/sampled_success eval/sampled_reward
    eval/greedy_success eval/greedy_reward eval/random_success eval/random_reward eval/oracle_success
    eval/oracle_reward warm_start/steps warm_start/first_cross_entropy warm_start/last_cross_entropy
"""
METRICS = tuple(_WRITTEN_OUT.split())
