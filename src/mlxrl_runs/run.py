"""The Run: the one file that knows every part. Turns a checked config into a trained or evaluated policy."""

import gc
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from mlxrl_runs import backend as backends
from mlxrl_runs import problems as wording
from mlxrl_runs.config import RunConfig
from mlxrl_runs.core.files import written_aside
from mlxrl_runs.core.protocols import Algorithm, EnvironmentFamily, HasValueHead, Refills, RunRecord, StepResult
from mlxrl_runs.core.reward_part import RewardPart
from mlxrl_runs.core.stop import StopRequest
from mlxrl_runs.errors import ConfigError, MlxrlError
from mlxrl_runs.schema import AdamWSettings, FullAdapter, Job
from mlxrl_runs.training.run_folder import RunFolder

# overrides that a next command must repeat
MAKES_THE_SCORE = ("model", "adapter", "env", "reward", "rollout", "experiment")
PROMPT_LETTERS = 300
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found": it is not needed
BACKEND = backends.prepare()  # before anything below imports MLX

import mlx.core as mx  # noqa: E402
from mlx.optimizers import Optimizer  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

from mlxrl_runs.check.gates import Bench, examine, probe_logp  # noqa: E402
from mlxrl_runs.check.words import require_whole, table  # noqa: E402
from mlxrl_runs.memory.limits import applied_limits, memory_size_bytes  # noqa: E402
from mlxrl_runs.memory.meter import Meter  # noqa: E402
from mlxrl_runs.policy.chat import ChatFormat  # noqa: E402
from mlxrl_runs.policy.export import talk_commands  # noqa: E402
from mlxrl_runs.policy.load import Policy, open_base, open_policy  # noqa: E402
from mlxrl_runs.policy.source import cache_folder  # noqa: E402
from mlxrl_runs.rollout.engine import Decoding, RolloutEngine  # noqa: E402
from mlxrl_runs.rollout.episodes import EpisodeRequest, Limits  # noqa: E402
from mlxrl_runs.rollout.on_policy import OnPolicy  # noqa: E402
from mlxrl_runs.rollout.sampling import Sampling  # noqa: E402
from mlxrl_runs.rollout.scoring import WeightedReward  # noqa: E402
from mlxrl_runs.tracking.build import make_trackers  # noqa: E402
from mlxrl_runs.tracking.drawing import readable_path  # noqa: E402
from mlxrl_runs.tracking.fan_out import FanOut  # noqa: E402
from mlxrl_runs.training.collapse import CollapseGuard  # noqa: E402
from mlxrl_runs.training.early_stop import EarlyStop  # noqa: E402
from mlxrl_runs.training.evaluate import Evaluator, Score  # noqa: E402
from mlxrl_runs.training.kl_control import KlControl  # noqa: E402
from mlxrl_runs.training.loop import Cadence, StepCallback, Trainer  # noqa: E402
from mlxrl_runs.training.metrics import evaluation_metrics  # noqa: E402
from mlxrl_runs.training.optimizer import LearningRate, make_optimizer  # noqa: E402
from mlxrl_runs.training.state import Checkpoints  # noqa: E402
from mlxrl_runs.training.update import Updater  # noqa: E402
from mlxrl_runs.training.warm_start import WarmStarter  # noqa: E402
from mlxrl_runs.training.watch import Watch  # noqa: E402


def execute(
    config: RunConfig,
    folder: RunFolder,
    *,
    overrides: Sequence[str],
    sweep: Mapping[str, Any] | None,
    stop: StopRequest,
    console: Console | None = None,
    callbacks: Sequence[StepCallback] = (),
) -> "Run":
    """Do the config's job in `folder` and return the run, its summary written there.

    Raises: MlxrlError subclasses for what a person can act on; Interrupted after everything was saved.
    """
    console = console or Console()
    if BACKEND.warning:
        console.print(Text(BACKEND.warning, style="bold red"), highlight=False, soft_wrap=True)
    with applied_limits(config.memory.cache_limit_gib, config.memory.wired_limit_gib) as limits:
        base = base_logp_of(config) if config.job is Job.CHECK else None
        run = Run(config, folder, console, stop, overrides, sweep, callbacks)
        run.record_machine(limits)
        if config.job is Job.TRAIN:
            run.train()
        elif config.job is Job.CHECK:
            run.check(base)
        else:
            run.evaluate()
        return run


class Question:
    """An environment of one turn that asks and pays nothing."""

    max_turns = 1

    def __init__(self, prompt: str, answer_prefix: str):
        self.prompt = prompt
        self.answer_prefix = answer_prefix

    def reset(self) -> str:
        return self.prompt

    def step(self, action: str) -> StepResult:
        return StepResult("", 0.0, True)

    def state_id(self, observation: str) -> str:
        return observation


def fresh_memory() -> None:
    """Forget the peaks and the freed buffers of what ran in this process before."""
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()


def open_policy_of(config: RunConfig, *, keep_reference: bool) -> Policy:
    """The policy a run of this config starts with."""
    adapter, model = config.adapter, config.model
    low_rank = {} if isinstance(adapter, FullAdapter) else adapter.model_dump(mode="json", exclude={"name"})
    return open_policy(
        source=model.source,
        path=model.path,
        revision=model.revision,
        shape=model.shape,
        precision=model.precision,
        adapter=adapter.name,
        seed=config.seed,
        keep_reference=keep_reference,
        **low_rank,
    )


def base_logp_of(config: RunConfig) -> mx.array | None:
    """(T, V) nats of job=check's probe under the model that never had an adapter; None under full training.

    Asked for before the policy is opened: two copies of a model may not fit.
    """
    if isinstance(config.adapter, FullAdapter):
        return None
    model = config.model
    base = open_base(
        source=model.source,
        path=model.path,
        revision=model.revision,
        shape=model.shape,
        precision=model.precision,
        seed=config.seed,
    )
    logp = probe_logp(base)
    del base
    fresh_memory()
    return logp


def prompt_of(config: RunConfig) -> str:
    """Something to say to the trained policy: what it reads last before it answers a held-out task, on one line."""
    try:
        family = cast(EnvironmentFamily, config.env)
        opening: Any = family.make(family.held_out_tasks()[0], config.seed, 0).reset()
        said = opening if isinstance(opening, str) else opening[-1]["content"]  # the last message of a conversation
        return " ".join(said.split())[:PROMPT_LETTERS]
    except Exception:  # an environment of a person's own may raise anything; a hint is no reason to fail
        return "Hello"


@dataclass
class Run:
    """One config, wired.

    Attributes: summary: what summary.json holds, once the job is done.
    """

    config: RunConfig
    folder: RunFolder
    console: Console
    stop: StopRequest
    overrides: Sequence[str] = ()
    sweep: Mapping[str, Any] | None = None
    callbacks: Sequence[StepCallback] = ()
    tracker: FanOut = field(init=False)
    policy: Policy = field(init=False)
    engine: RolloutEngine = field(init=False)
    evaluator: Evaluator = field(init=False)
    blas_threads: int | None = field(init=False)
    summary: dict[str, Any] = field(default_factory=dict, init=False)
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        # a check has no curves: its files and the console are all there is to it
        tracking = {"name": "jsonl"} if self.config.job is Job.CHECK else self.config.tracking.model_dump(mode="json")
        self.tracker = make_trackers(tracking=tracking, folder=self.folder.path, console=self.console)
        rollout = self.config.rollout
        self.policy = open_policy_of(self.config, keep_reference=self._compares)
        self._require_layers_enough()
        if self.algorithm.needs.values and self.config.job is not Job.EVALUATE:
            self.policy.add_value_head()
        small = self.policy.hidden_size < backends.SHARED_BLAS_FROM
        self.blas_threads = 1 if small and backends.use_blas_threads(BACKEND, 1) else None
        self.engine = RolloutEngine(
            self.policy.model,
            ChatFormat(self.policy.tokenizer, self.config.model.thinking),
            self.policy.eos_ids,
            Limits(
                max_completion_tokens=rollout.max_completion_tokens,
                max_prompt_tokens=rollout.max_prompt_tokens,
                max_episode_tokens=rollout.max_episode_tokens,
                stop_strings=rollout.stop_strings,
                ignore_eos=rollout.ignore_eos,
            ),
            self._decoding(),
            stop=self.stop,
            scorer=self._scorer(),
        )
        if self.engine.mode != rollout.mode:
            self._say(f"rollout.mode={rollout.mode}: {self.engine.mode_reason}")
        self.evaluator = Evaluator(
            self.engine,
            self.family,
            self._sampling(),
            seed=self.config.seed,
            episodes=self.config.trainer.evaluation_episodes,
            rows=self.config.trainer.evaluation_rows,
            stop=self.stop,
        )
        self.tracker.start(self._record())

    def _require_layers_enough(self) -> None:
        """A model of the hub shows its depth only now."""
        memory, layers = self.config.memory, len(self.policy.model.layers)
        if problems := wording.too_coarse(memory.checkpoint, memory.checkpoint_every, layers):
            raise ConfigError(problems)

    def _scorer(self) -> WeightedReward | None:
        """None where the environment's own reward is all there is: nothing has to be worked out then."""
        [only, *others] = self._reward_parts.values()
        return None if not others and only.keeps_parts and only.weight == 1 else WeightedReward(self._reward_parts)

    def record_machine(self, limits: Mapping[str, float]) -> None:
        """Put the device and the choices that were made for it into run.json."""
        self.folder.update(
            device={
                "backend": BACKEND.name,
                "blas": BACKEND.blas,
                "name": str(mx.device_info().get("device_name", mx.default_device())),
                "memory_bytes": memory_size_bytes(),
            },
            model=self._model_record(),
            engine={
                **self.engine.choices(),
                "blas_threads": self.blas_threads,  # None: the library's own choice
                "trainable_parameters": self.policy.trainable_parameters,
                **limits,
            },
        )

    def _fix_reference(self) -> None:
        """What the policy is compared with, told and recorded."""
        reference = self.policy.fix_reference()
        self.folder.update(reference=reference)
        if self._compares:
            self.console.print(f"reference of kl/reference: {reference}", highlight=False, soft_wrap=True)

    @property
    def _compares(self) -> bool:
        """Whether anything asks for the reference policy."""
        return self.algorithm.needs.reference or self.config.tracking.kl_every > 0

    def _model_record(self) -> dict[str, str | None]:
        """What was opened; a commit that main stood for is told, so that it can be pinned."""
        origin, asked = self.policy.origin, self.config.model
        if origin.revision is not None and asked.revision is None:
            pin = f"model.revision={origin.revision}"
            self._say(f"model: main of {origin.path} is commit {origin.revision}; to stay with it: {pin}")
        return {
            "path": origin.path,
            "revision": origin.revision,
            "folder": None if origin.folder is None else str(origin.folder),
        }

    def train(self) -> None:
        """job=train: evaluate, train, evaluate, save."""
        trainer = self._trainer()
        with self._closing(trainer.evaluations, trainer):
            trainer.train()

    def evaluate(self) -> None:
        """job=evaluate: score the base model, or a checkpoint, on held-out tasks."""
        evaluations: dict[str, dict[str, Score] | None] = {"before": None, "after": None}
        with self._closing(evaluations, None):
            if self.config.checkpoint is not None:
                self.policy.load_weights(Path(self.config.checkpoint))
            scores = self.evaluator.evaluate()
            evaluations["after"] = scores
            self.tracker.log_evaluation("", scores)
            self.tracker.log(0, evaluation_metrics(scores))

    def check(self, base: mx.array | None) -> None:
        """job=check: every gate on this policy, or on a checkpoint; check.json has what was found.

        Args: base: see `base_logp_of`.
        Raises: CheckFailed when a gate is broken.
        """
        with self._closing({}, None):
            if self.config.checkpoint is not None:
                self.policy.load_weights(Path(self.config.checkpoint))
            report = examine(Bench(self.policy, self.config, base, self.stop))
            self.folder.write_json("check.json", report.as_json())
            for line in table(report):
                self.console.print(Text(line), highlight=False, soft_wrap=True)
            require_whole(report)

    def generate(self, prompts: Sequence[str], *, max_tokens: int, greedy: bool, answer_prefix: str = "") -> list[str]:
        """What the policy answers to each prompt, put to it in its chat format."""
        engine = RolloutEngine(
            self.policy.model, self.engine.chat, self.policy.eos_ids, Limits(max_tokens, max_episode_tokens=2**31)
        )
        requests = [
            EpisodeRequest(prompt, 0, partial(Question, prompt, answer_prefix), (self.config.seed, number), greedy)
            for number, prompt in enumerate(prompts)
        ]
        played, _ = engine.play(requests, self._sampling())
        return [trajectory.turns[0].text for trajectory in played]

    @contextmanager
    def _closing(self, evaluations: Mapping[str, dict[str, Score] | None], trainer: Trainer | None) -> Iterator[None]:
        """Around a job: however it ends, its weights, summary and trackers are brought to an end with it."""
        try:
            yield
            self._save_weights(trainer)
        except BaseException as error:
            code = error.exit_code if isinstance(error, MlxrlError) else 1
            with suppress(OSError):  # a full disk, say: the first error is the one to tell
                self._save_weights(trainer)
            self._close("interrupted" if code > 128 else "failed", code, evaluations, trainer)
            raise
        self._close("finished", 0, evaluations, trainer)

    def _save_weights(self, trainer: Trainer | None) -> None:
        if trainer is not None and trainer.progress.step > 0 and trainer.is_sound and not self._weights.exists():
            with written_aside(self._weights) as aside:
                self.policy.save(aside)

    def _close(
        self,
        state: str,
        code: int,
        evaluations: Mapping[str, dict[str, Score] | None],
        trainer: Trainer | None,
    ) -> None:
        self.summary = self._summary(state, evaluations, trainer)
        with suppress(OSError) if code else nullcontext():
            if evaluations:
                self.folder.write_json("evaluation.json", evaluations)
            self.folder.write_json("summary.json", self.summary)
        self.tracker.finish(self.summary, code)
        timings = {"rollout_step_milliseconds": self.engine.timings} if self.engine.timings else {}
        self.folder.update(wandb_id=self.tracker.run_id, **timings)

    def _optimizer(self) -> Optimizer:
        optimizer = self.config.optimizer
        return make_optimizer(
            optimizer.name,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay if isinstance(optimizer, AdamWSettings) else 0.0,
        )

    def _scheduled(self, peak: float) -> LearningRate:
        """The schedule of the optimizer section, over all of the run's optimizer steps."""
        optimizer, algorithm = self.config.optimizer, self.algorithm
        return LearningRate(
            peak,
            optimizer.schedule,
            optimizer.warmup_steps,
            self.config.steps * algorithm.updates_per_batch * algorithm.minibatches,
            optimizer.final_learning_rate_ratio,
        )

    def _updater(self, learning_rate: LearningRate, **value: Any) -> Updater:
        config, optimizer = self.config, self.config.optimizer
        return Updater(
            self.policy,
            self._optimizer(),
            learning_rate,
            temperature=config.rollout.temperature,
            rows=config.memory.micro_batch_size,
            checkpoint_every=config.memory.checkpoint_every,
            max_grad_norm=optimizer.max_grad_norm,
            max_nonfinite=config.trainer.max_nonfinite_updates,
            seed=config.seed,
            stop=self.stop,
            **value,
        )

    def _rl_updater(self) -> Updater:
        rate = self._scheduled(self.config.optimizer.learning_rate)
        if not isinstance(self.algorithm, HasValueHead):
            return self._updater(rate)
        value_rate = self._scheduled(self.algorithm.value_learning_rate)
        return self._updater(rate, value_optimizer=self._optimizer(), value_learning_rate=value_rate)

    def _warm_starter(self) -> WarmStarter | None:
        settings = self.config.trainer.warm_start
        if settings.steps == 0:
            return None
        rate = self.config.optimizer.learning_rate if settings.learning_rate is None else settings.learning_rate
        return WarmStarter(
            self.family,
            self.engine.chat,
            self._updater(LearningRate(rate, "constant", 0, settings.steps, 1.0)),
            steps=settings.steps,
            examples_per_step=settings.examples_per_step,
            actions=settings.actions,
            seed=self.config.seed,
        )

    def _trainer(self) -> Trainer:
        config, guard = self.config, self.config.trainer.collapse_guard
        chooses = isinstance(self.algorithm, Refills) and self.algorithm.max_refills > 0
        experience = OnPolicy(
            self.engine,
            self.family,
            self._sampling(),
            seed=config.seed,
            tasks_per_step=config.tasks_per_step,
            group_size=config.group_size,
            refills=cast(Refills, self.algorithm) if chooses else None,
        )
        return Trainer(
            policy=self.policy,
            experience=experience,
            algorithm=self.algorithm,
            updater=self._rl_updater(),
            evaluator=self.evaluator,
            tracker=self.tracker,
            checkpoints=Checkpoints(self.folder.path),
            meter=Meter(),
            cadence=Cadence(
                steps=config.steps,
                eval_every=config.trainer.eval_every,
                save_every=config.trainer.save_every,
                kl_every=config.tracking.kl_every,
                trajectories_every=config.tracking.trajectories_every,
                trajectories=config.tracking.trajectories,
                budget_tokens=config.budget.tokens,
                budget_episodes=config.budget.episodes,
                budget_minutes=config.budget.minutes,
                inject_nan_step=config.debug.inject_nan_step,
            ),
            temperature=config.rollout.temperature,
            micro_batch_rows=config.memory.micro_batch_size,
            stop=self.stop,
            say=self._say,
            fix_reference=self._fix_reference,
            warm_starter=self._warm_starter(),
            guard=CollapseGuard(guard.window_steps, guard.lost_share) if guard.enabled else None,
            kl_control=KlControl.of(self.algorithm),
            watch=Watch(dict(wording.walk(config.plain()))),
            early_stop=self._early_stop(),
            callbacks=self.callbacks,
        )

    def _early_stop(self) -> EarlyStop | None:
        stop, config = self.config.trainer.early_stop, self.config
        if stop.metric is None:
            return None
        every = {"eval": config.trainer.eval_every, "kl": max(config.tracking.kl_every, 1)}
        expected = every.get(stop.metric.partition("/")[0], 1)
        return EarlyStop(stop.metric, stop.above, stop.below, stop.patience, expected)

    def _say(self, line: str) -> None:
        """Something a person can act on."""
        self.console.print(Text(line, style="bold yellow"), highlight=False, soft_wrap=True)

    def _sampling(self) -> Sampling:
        rollout, chat = self.config.rollout, self.engine.chat
        bias = {chat.token_id(token, "rollout.token_bias"): value for token, value in rollout.token_bias.items()}
        return Sampling(rollout.temperature, rollout.top_p, rollout.min_p, rollout.top_k, bias)

    def _decoding(self) -> Decoding:
        rollout = self.config.rollout
        return Decoding(
            mode=rollout.mode,
            compile_when=rollout.compile,
            expected_steps=self._expected_decode_steps(),
            tune=rollout.tune,
            repeatable=self.config.reproducible,
            merge_adapter=rollout.merge_adapter,
            max_rows=rollout.max_rows,
            max_cache_bytes=rollout.max_cache_bytes,
            env_threads=rollout.env_threads,
            memory_bytes=memory_size_bytes(),
            timings_file=cache_folder().with_name("rollout_timings.json"),
        )

    def _expected_decode_steps(self) -> int | None:
        """At most: many actions end before their limit. None where the environment does not say how many turns."""
        config = self.config
        rollouts = config.steps if config.job is Job.TRAIN else 0
        evaluations = 2 + (rollouts // config.trainer.eval_every if config.trainer.eval_every else 0)
        turns = getattr(self.family, "max_turns", None)
        if turns is None:
            return None
        return (rollouts + evaluations) * turns * config.rollout.max_completion_tokens

    @property
    def _reward_parts(self) -> dict[str, RewardPart]:
        return cast(dict[str, RewardPart], self.config.reward)

    @property
    def family(self) -> EnvironmentFamily:
        return cast(EnvironmentFamily, self.config.env)

    @property
    def algorithm(self) -> Algorithm:
        return cast(Algorithm, self.config.algorithm)

    @property
    def _weights(self) -> Path:
        """Where the final weights go."""
        return self.folder.path / ("model" if self._is_whole else "adapters")

    @property
    def _is_whole(self) -> bool:
        """Whether what is saved is a model of its own, and no adapter on another."""
        return self.policy.adapter_config is None

    def _record(self) -> RunRecord:
        config = self.config
        return RunRecord(
            name=config.run_name,
            folder=str(self.folder.path),
            job=config.job,
            config=config.plain(),
            overrides=tuple(self.overrides),
            group=self.sweep["name"] if self.sweep else None,
            tags=config.tags,
            notes=config.notes,
            steps=config.steps if config.job is Job.TRAIN else 0,
            versions={name: version(name) for name in ("mlx", "mlx-lm", "mlxrl-runs")},
        )

    def _summary(
        self, state: str, evaluations: Mapping[str, dict[str, Score] | None], trainer: Trainer | None
    ) -> dict[str, Any]:
        total = time.perf_counter() - self.started
        summary: dict[str, Any] = {
            "state": state,
            "steps": 0,
            "evaluation": dict(evaluations),
            "measured": [label for label, part in self._reward_parts.items() if part.weight == 0],
            "files": {"run folder": str(self.folder.path)},
            "device": " ".join(filter(None, [BACKEND.name, BACKEND.blas])),
            "seconds": {"total": total},
            "stopped": None,
            "warnings": [],
            "next": [],
        }
        if trainer is None:
            return summary
        done, meter, saved = trainer.progress, trainer.meter, self._weights.exists()
        return summary | {
            "steps": done.step,
            "final": trainer.final,
            "best": trainer.best,
            "peaks": dict(meter.highest_bytes),
            "seconds": {**meter.total_seconds, "total": total},
            "tokens": done.counts(),
            "stopped": trainer.stopped,
            "warnings": trainer.warnings,
            "files": summary["files"] | ({"weights": str(self._weights)} if saved else {}),
            "next": self._next_commands() if saved else [],
        }

    def _next_commands(self) -> list[str]:
        kept = [override for override in self.overrides if override.lstrip("+").startswith(MAKES_THE_SCORE)]
        weights, run = readable_path(str(self._weights)), readable_path(str(self.folder.path))
        saved = [
            *self._talk_commands(weights),
            shlex.join(["python", "-m", "mlxrl_runs.export", run, *([] if self._is_whole else ["--fuse"])]),
        ]
        if self.config.python_parts:
            return saved
        scored = ["job=evaluate", *kept, f"seed={self.config.seed}", f"checkpoint={weights}"]
        return [
            *saved,
            shlex.join(["python", "-m", "mlxrl_runs", *scored]),
            shlex.join(["python", "-m", "mlxrl_runs", "-m", *kept, "algorithm=grpo,gigpo", "seed=0,1"]),
        ]

    def _talk_commands(self, weights: str) -> Sequence[str]:
        """None for an adapter on weights that no folder holds as they are: mlx-lm opens it only once it is fused."""
        if self._is_whole:
            return talk_commands(weights, None, prompt_of(self.config))
        if self.policy.origin.folder is None or not self.policy.is_as_stored:
            return ()
        return talk_commands(readable_path(str(self.policy.origin.folder)), weights, prompt_of(self.config))
