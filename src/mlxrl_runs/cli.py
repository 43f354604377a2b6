"""The command line: `python -m mlxrl_runs [overrides]`. Light imports only: help and refusals come at once."""

import argparse
import difflib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mlxrl_runs.errors import ConfigError, MlxrlError
from mlxrl_runs.groups import conf_folder, group_choices

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mlxrl_runs.config import RunConfig

COMMANDS = ("ls", "show", "tail")
HELP_COMMAND = "python -m mlxrl_runs --help"
HYDRA_FLAGS = ("cfg", "info", "hydra_help", "shell_completion")
HELP = """\
Reinforcement learning of language models on MLX, run as experiments.

usage: python -m mlxrl_runs [KEY=VALUE ...]            train, evaluating before and after
       python -m mlxrl_runs job=evaluate [checkpoint=DIR]    score the model, or a checkpoint, on held-out tasks
       python -m mlxrl_runs job=check [checkpoint=DIR]       does this model compute right here? exit 1 if not
       python -m mlxrl_runs job=doctor                 this machine, and what is wrong with it, for a bug report
       python -m mlxrl_runs -m KEY=A,B,C ...           one run for every combination
       python -m mlxrl_runs ls                         runs, newest first: how far each came and what it reached
       python -m mlxrl_runs show [RUN]                 one run in full; RUN: its folder or a part of its name
       python -m mlxrl_runs tail [RUN] [-f]            its last steps; -f goes on until the run ends
       python -m mlxrl_runs.export RUN_DIR [--fuse]    what mlx-lm opens: the adapter, or a whole model

groups (GROUP=CHOICE)
{groups}

keys used most
  steps                            how long to train
  group_size                       G, episodes of the same task that are compared
  tasks_per_step                   tasks per step; a step rolls out group_size x tasks_per_step episodes
  seed                             everything random follows from it
  optimizer.learning_rate          follows the model unless given
  adapter.rank                     size of the LoRA adapter
  rollout.max_completion_tokens    longest answer, per turn
  rollout.temperature              of sampling
  memory.micro_batch_size          rows of one pass; smaller takes less memory and gives the same gradient
  memory.checkpoint                layer, every_2 ...: layers computed twice; less memory, the same gradient
  paths.output                     where runs are written
every key with its value: python -m mlxrl_runs --cfg job

examples
  python -m mlxrl_runs algorithm=gigpo env=recurring group_size=4
  python -m mlxrl_runs model.path=DIR adapter.rank=8 tracking=jsonl
  python -m mlxrl_runs -m group_size=4,8 seed=0,1 name=my_sweep

flags: -m --multirun, --config-dir DIR (your own groups), --cfg job|hydra|all, --info, --hydra-help, --shell-completion
exit codes: 0 done, 1 the run failed, 2 wrong config or input, 130 / 143 stopped by Ctrl-C / SIGTERM (all is saved)
HYDRA_FULL_ERROR=1 shows tracebacks.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without a letter ends no sweep
    try:
        if words and _is_command(words[0]):
            from mlxrl_runs import listing

            return listing.main(words)
        arguments = _parse(words)
        config_dirs = [arguments.config_dir] if arguments.config_dir else []
        if arguments.help:
            print(help_text(config_dirs), end="")
            return 0
        if any(getattr(arguments, flag) for flag in HYDRA_FLAGS):
            return _hydras_own(words, arguments, config_dirs)
        if arguments.multirun:
            from mlxrl_runs.sweep import run_sweep

            return run_sweep(arguments.overrides, config_dirs)
        return _run(arguments.overrides, config_dirs)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _report(error)


def _is_command(word: str) -> bool:
    """Whether the first word is a command and neither a flag nor an override.

    Raises: ConfigError for a word that is nothing of all this.
    """
    if "=" in word or word.startswith(("-", "~")) or not word:
        return False
    if word not in COMMANDS:
        near = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]}?" if near else "To change a key, write KEY=VALUE."
        raise ConfigError(f"{word}: no such command; commands: {', '.join(COMMANDS)}. {hint} See: {HELP_COMMAND}")
    return True


def help_text(config_dirs: Sequence[str] = ()) -> str:
    lines = [
        f"  {group:<10} {', '.join(names)}" for group, names in group_choices(config_dirs).items() if len(names) > 1
    ]
    return HELP.format(groups="\n".join(lines))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See: {HELP_COMMAND}")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Flags stand anywhere among the overrides."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=_INFO)
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    arguments = parser.parse_intermixed_args(list(words))
    if (arguments.package or arguments.resolve) and not arguments.cfg:
        parser.error("--package and --resolve go with --cfg")
    return arguments


_INFO = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]


class _NothingToRun(Exception):
    """The composed config asks for a job that needs no worker."""

    def __init__(self, config: "RunConfig"):
        self.config = config


def _run(overrides: Sequence[str], config_dirs: Sequence[str]) -> int:
    from mlxrl_runs.supervise import supervise

    def composed() -> dict[str, Any]:
        from mlxrl_runs.config import compose_config, validate

        config = validate(compose_config(overrides, config_dirs))
        if config.job == "doctor":
            raise _NothingToRun(config)
        return config.plain()

    try:
        return supervise(composed, overrides).exit_code
    except _NothingToRun as ended:
        return _doctor(ended.config)


def _doctor(config: "RunConfig") -> int:
    from mlxrl_runs.doctor import block, examine

    output = Path(config.paths.output).expanduser().absolute()
    print(block(examine(output, wants_wandb=config.tracking.name == "wandb")), end="")
    return 0


def _hydras_own(words: Sequence[str], arguments: argparse.Namespace, config_dirs: Sequence[str]) -> int:
    """Flags that Hydra answers by itself; nothing is run."""
    asked = arguments.shell_completion and any(word.startswith("query=") for word in words)
    if asked and _completes_commands(os.environ.get("COMP_LINE", "")):
        return 0
    import hydra

    if arguments.cfg and not arguments.multirun:
        from mlxrl_runs.config import as_typed, compose_config, implied_model

        compose_config(arguments.overrides, config_dirs)  # our message for what cannot be composed
        place = words.index(arguments.overrides[0]) if arguments.overrides else 0  # argparse wants them side by side
        words = [word if word.startswith("-") else as_typed([word])[0] for word in words]
        words[place:place] = implied_model(as_typed(arguments.overrides))
    application = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(_nothing)
    before, sys.argv = sys.argv, ["mlxrl-runs", *words]
    try:
        application()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.argv = before
    return 0


def _completes_commands(line: str) -> bool:
    """Print the commands that a line may begin with, or what follows one; true when that is all there is to say.

    Args: line: what was typed up to now; Hydra completes groups and keys in it.
    """
    before = line.split() if line.endswith(" ") else line.split()[:-1]
    if len(before) < 2:
        print("\n".join(COMMANDS))
        return False
    if before[1] not in COMMANDS:
        return False
    from mlxrl_runs.listing import completions

    print("\n".join(completions(before[1])))
    return True


def _nothing(config: "DictConfig") -> None:
    """The job of a command that only shows something."""


def _report(error: Exception) -> int:
    """Say what went wrong and return the exit code."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    if isinstance(error, ConfigError):
        many = len(error.problems) > 1
        print(f"The config has {len(error.problems)} problems:" if many else "The config is wrong:", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
    elif isinstance(error, MlxrlError):
        print(f"Failed: {error}", file=sys.stderr)
    else:
        print(f"Failed: {type(error).__name__}: {error}", file=sys.stderr)
        print("This looks like a bug. For a traceback: HYDRA_FULL_ERROR=1 and the same command.", file=sys.stderr)
    return error.exit_code if isinstance(error, MlxrlError) else 1
