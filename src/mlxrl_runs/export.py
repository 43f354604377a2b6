"""Make a run's policy something that mlx-lm opens, and prove that it is the same policy.

    python -m mlxrl_runs.export RUN_DIR [--fuse [--dequantize]] [--out DIR]

RUN_DIR is a run's folder, outputs/latest, or an adapters/ or checkpoints/step_* folder inside one. Without --fuse the
adapter is copied, with its base named; with it a whole model is written. What was written is opened again by mlx-lm
and its logits are compared with those of the policy itself. Exit codes: 0 done, 1 it is not the same, 2 wrong input.
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mlxrl_runs.core.files import written_aside
from mlxrl_runs.errors import ConfigError, MlxrlError
from mlxrl_runs.runs import SavedWeights, find_weights

if TYPE_CHECKING:
    from mlxrl_runs.policy.load import Policy
    from mlxrl_runs.schema import RunConfig

# As a share of the largest logit. An adapter comes out bit-equal; fusing rounds in another order: 1e-6 of it on the
# shipped model (2e-5 of 16), 2e-6 on SmolLM2 (8e-5 of 40).
TOLERANCE = 1e-5
MAKES_THE_POLICY = ("seed", "model", "adapter", "env")  # sections of a config; the environment says what to ask it


class ExportDiffers(MlxrlError):
    """What was written does not answer as the policy does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return the exit code."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("mlxrl_runs.export", description=__doc__, formatter_class=as_written)
    parser.add_argument("run", metavar="RUN_DIR")
    parser.add_argument("--fuse", action="store_true", help="write a whole model, the adapter merged into its base")
    parser.add_argument("--dequantize", action="store_true", help="with --fuse: make a quantised base a float one")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN_DIR/export/adapter, fused or model")
    arguments = parser.parse_args(argv)
    try:
        export(arguments.run, fuse=arguments.fuse, dequantize=arguments.dequantize, out=arguments.out)
    except MlxrlError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def export(run: str, *, fuse: bool = False, dequantize: bool = False, out: Path | None = None) -> Path:
    """Write the policy of a run and return its folder.

    Raises: ConfigError for wrong input; ExportDiffers, leaving nothing behind, when the check fails.
    """
    saved = find_weights(run)
    if dequantize and not fuse:
        raise ConfigError("--dequantize: an adapter alone has nothing to dequantise. Try --fuse --dequantize.")
    config = _config_of(saved.run)

    from mlxrl_runs.run import open_policy_of, prompt_of

    policy = open_policy_of(config, keep_reference=False)
    policy.load_weights(saved.folder)
    kind = _kind(policy, fuse, dequantize)
    print(f"{config.name}: {kind} from {saved.folder}")
    final = _place(saved, kind, out)
    with _writing(final, replace=out is None) as aside:
        _write(policy, kind, saved.folder, aside, dequantize)
    commands = _talk(policy, kind, final, prompt_of(config))
    print(f"written to {final}\n\ntalk to it\n  " + "\n  ".join(commands))
    return final


def _config_of(run: Path) -> "RunConfig":
    """Raises: ConfigError when the run's config is missing, or no longer fits this version or machine."""
    import yaml  # type: ignore[import-untyped]

    from mlxrl_runs.config import compose_config, validate

    try:
        plain = yaml.safe_load((run / "config.yaml").read_text())
        if not isinstance(plain, dict):
            raise ConfigError("is damaged: it holds no config.")
        # how a policy was trained says nothing about what it is now: its reward's file may be gone, its algorithm be
        # unknown here, and the keys of both be those of another version
        policy = {key: plain[key] for key in MAKES_THE_POLICY if key in plain}
        return validate(compose_config([]) | policy | {"name": run.name})
    except OSError as error:
        raise ConfigError(f"RUN_DIR: {run} has no config.yaml that can be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{run / 'config.yaml'}: is damaged ({' '.join(str(error).split())}).") from error
    except ConfigError as error:
        raise ConfigError([f"{run / 'config.yaml'}: {problem}" for problem in error.problems]) from error


def _kind(policy: "Policy", fuse: bool, dequantize: bool) -> str:
    """adapter, fused or model.

    Raises: ConfigError for a wish that this policy leaves nothing to do for.
    """
    from mlxrl_runs.policy.export import base_folder
    from mlxrl_runs.policy.precision import is_quantised

    if policy.adapter_config is None:
        if fuse:
            raise ConfigError("--fuse: this run trained every weight, so its model is whole already. Leave --fuse out.")
        return "model"
    if dequantize and not is_quantised(policy.model):
        raise ConfigError("--dequantize: the base of this run is not quantised. Leave --dequantize out.")
    if not fuse:
        base_folder(policy)
    return "fused" if fuse else "adapter"


def _place(saved: SavedWeights, kind: str, out: Path | None) -> Path:
    final = saved.run / "export" / kind if out is None else out.expanduser().absolute()
    if out is not None and final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise ConfigError(f"--out: {out} is there already and not empty. Give a folder that is new.")
    return final


@contextmanager
def _writing(final: Path, replace: bool) -> Iterator[Path]:
    """A folder to write into that takes `final`'s place when all went well, and is gone otherwise.

    Args: replace: an earlier export may be there.
    Raises: ConfigError when it cannot be written.
    """
    try:
        with written_aside(final) as aside:
            yield aside
            if replace or final.is_dir():
                shutil.rmtree(final, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(final.with_name(f"{final.name}.partial"), ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"--out: {final} cannot be written ({error}). Try --out DIR.") from error
        raise


def _write(policy: "Policy", kind: str, weights: Path, folder: Path, dequantize: bool) -> None:
    """Write, open again, compare.

    Raises: ExportDiffers.
    """
    from mlxrl_runs.policy import export as formats
    from mlxrl_runs.policy.precision import is_quantised

    requantised = kind == "fused" and not dequantize and is_quantised(policy.model)
    live = formats.answer(policy.model, policy.tokenizer)
    is_exact = kind != "fused" or formats.is_float32(policy)
    base = folder
    if kind == "adapter":
        base = formats.base_folder(policy)
        formats.copy_adapter(weights, base, folder)
    elif kind == "model":
        formats.copy_model(policy, weights, folder)
    else:
        formats.write_fused(policy, folder, dequantize=dequantize)
    again = formats.reopened(base, folder if kind == "adapter" else None)
    allowed = TOLERANCE * live.largest if is_exact else None
    _compare(live.difference(again), allowed, len(live.tokens), kind, requantised)


def _compare(difference: float, allowed: float | None, tokens: int, kind: str, requantised: bool) -> None:
    bound = "rounding of the fused weights moves them" if allowed is None else f"at most {allowed:.2g} is allowed"
    bound += "; --dequantize avoids most of that" if requantised else ""
    print(f"largest difference of a logit from the live policy: {difference:.2g} over {tokens} tokens ({bound})")
    if not difference < float("inf") or (allowed is not None and difference > allowed):
        advice = "The base on disk is not what was trained on; try --fuse." if kind == "adapter" else "Nothing is kept."
        raise ExportDiffers(
            f"mlx-lm opens what was written as another policy: a logit differs by {difference:.2g}. {advice}"
        )


def _talk(policy: "Policy", kind: str, final: Path, prompt: str) -> Sequence[str]:
    from mlxrl_runs.policy.export import base_folder, talk_commands
    from mlxrl_runs.tracking.drawing import readable_path

    shown: Callable[[Path], str] = lambda path: readable_path(str(path))
    if kind == "adapter":
        return talk_commands(shown(base_folder(policy)), shown(final), prompt)
    return talk_commands(shown(final), None, prompt)


if __name__ == "__main__":
    sys.exit(main())
