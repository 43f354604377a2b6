"""Opens a policy: weights through mlx-lm, tokenizer, adapter, and the reference it is compared with."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import Model, ModelArgs
from mlx_lm.utils import load_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mlxrl_runs.core.seeding import derive_seed
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.policy.adapters import adapters_off, add_adapter, is_fresh, misfits, save_adapter, swapped_in
from mlxrl_runs.policy.head import SPLITTABLE
from mlxrl_runs.policy.precision import is_quantised, with_precision
from mlxrl_runs.policy.shapes import SHAPES
from mlxrl_runs.policy.smollm2 import converted
from mlxrl_runs.policy.source import SMOLLM2_SHA256, TINY, Located, cache_folder, locate
from mlxrl_runs.policy.value_head import VALUE_HEAD_FILE, ValueHead


@dataclass
class Policy:
    """A language model that is being trained.

    Attributes:
        model: mlx-lm's module; in `eval` mode except while a gradient is taken.
        eos_ids: tokens that end an action.
        config: the model's config.json.
        origin: what was opened.
        adapter_config: mlx-lm's adapter config, or None when every weight is trained.
        reference_is: "start", the policy as it was at the last `fix_reference`; "base", the adapter switched off.
        keeps_reference: false under full training that compares with nothing, which saves a copy of the weights.
        is_as_stored: the base has the numbers that its files have; an adapter on others is another policy.
        value_head: None unless one was added.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    config: dict[str, Any]
    origin: Located
    adapter_config: dict[str, object] | None = None
    reference_is: str = "start"
    keeps_reference: bool = True
    is_as_stored: bool = True
    value_head: ValueHead | None = None
    _starting: dict[str, mx.array] | None = field(default=None, repr=False)  # None: the base is the reference

    def fix_reference(self) -> str:
        """From now on the reference is the policy as it is here and now. The run calls it when RL begins.

        Returns: what the reference is, in words.
        """
        self._starting = None
        if self.adapter_config is None:
            if not self.keeps_reference:
                return "none: nothing compares with it"
            # the arrays are shared until an update replaces them
            self._starting = dict(tree_flatten(self.model.trainable_parameters()))
            return "the policy that training starts from, a copy of all weights"
        if self.reference_is == "base":
            return "the base model, without the adapter"
        if is_fresh(self.model):
            return "the policy that training starts from, which is the base model without the adapter"
        self._starting = dict(tree_flatten(self.model.trainable_parameters()))
        return "the policy that training starts from, a copy of its adapter"

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """Inside, the model is the policy that the trained one is compared with."""
        if self._starting is not None:
            with swapped_in(self.model, self._starting):
                yield self.model
        elif self.adapter_config is not None:
            with adapters_off(self.model):
                yield self.model
        else:
            raise RuntimeError("no reference was kept: full training without keep_reference")

    def add_value_head(self) -> None:
        """A head on the hidden states behind the last norm.

        Raises: ConfigError when the model's class does not show its hidden states.
        """
        if not isinstance(self.model, SPLITTABLE):
            shown = ", ".join(sorted(kind.__module__.rsplit(".", 1)[-1] for kind in SPLITTABLE))
            raise ConfigError(
                f"algorithm: got one with a value head, which reads hidden states of {shown} models and not of "
                f"{self.config.get('model_type')}. Try algorithm=gigpo or another without a value head."
            )
        self.value_head = ValueHead(self.hidden_size)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, from the model's config (nested in multimodal ones)."""
        return int(self.config.get("hidden_size") or self.config.get("text_config", {}).get("hidden_size", 0))

    @property
    def trainable_parameters(self) -> int:
        return sum(array.size for _, array in tree_flatten(self.model.trainable_parameters()))

    def save(self, folder: Path) -> None:
        """What `mlx_lm.load` opens: the adapter alone, or the whole model after full training."""
        if self.value_head is not None:
            folder.mkdir(parents=True, exist_ok=True)
            mx.save_safetensors(str(folder / VALUE_HEAD_FILE), dict(tree_flatten(self.value_head.parameters())))
        if self.adapter_config is not None:
            save_adapter(self.model, self.adapter_config, folder)
            return
        folder.mkdir(parents=True, exist_ok=True)
        weights = dict(tree_flatten(self.model.parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        self.tokenizer.save_pretrained(folder)

    def load_weights(self, folder: Path, key: str = "checkpoint") -> None:
        """Put saved weights (see `save`) into this policy.

        Args: key: the config's key that named the folder, for messages.
        Raises: ConfigError when the folder holds no weights, or weights that would mean something else here.
        """
        adapted = self.adapter_config is not None
        file = folder / ("adapters.safetensors" if adapted else "model.safetensors")
        if not file.is_file():
            raise ConfigError(f"{key}={folder} has no {file.name}. Give a run's adapters/ or checkpoints/step_*")
        if adapted:
            self._check_adapter(folder, key)
        own = dict(tree_flatten(self.model.trainable_parameters() if adapted else self.model.parameters()))
        try:
            saved = cast(dict[str, mx.array], mx.load(str(file)))
        except RuntimeError as error:
            raise ConfigError(f"{key}={folder}: {file.name} is damaged ({error}). Try an earlier one") from error
        differing = sorted(name for name in saved.keys() | own.keys() if _shape_in(saved, name) != _shape_in(own, name))
        if differing:
            name = differing[0]
            raise ConfigError(
                f"{key}={folder} does not fit this model and adapter: {name} has shape {_shape_in(own, name)} here and "
                f"{_shape_in(saved, name)} there. See the config.yaml of its run"
            )
        self.model.load_weights(list(saved.items()), strict=False)
        if self.value_head is not None and (folder / VALUE_HEAD_FILE).is_file():
            self.value_head.load_weights(str(folder / VALUE_HEAD_FILE))

    def _check_adapter(self, folder: Path, key: str) -> None:
        """The same weights under another scale, or on other layers, would be another policy."""
        file = folder / "adapter_config.json"
        try:
            saved = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}={folder}: adapter_config.json cannot be read ({error})") from error
        differing = misfits(saved, cast(dict[str, Any], self.adapter_config))
        if differing:
            raise ConfigError(f"{key}={folder} does not fit this config: {'; '.join(differing)}")


def _shape_in(weights: Mapping[str, mx.array], name: str) -> tuple[int, ...] | None:
    return weights[name].shape if name in weights else None


def open_policy(
    *,
    source: str,
    path: str | None,
    shape: str | None,
    adapter: str,
    seed: int,
    keep_reference: bool,
    revision: str | None = None,
    precision: str = "stored",
    rank: int = 8,
    scale: float = 10.0,
    dropout: float = 0.0,
    targets: str | Sequence[str] = "auto",
    init: str | None = None,
    reference: str = "start",
) -> Policy:
    """Load a model, or draw one, and make it trainable.

    Args:
        source, path, revision: see `policy.source.locate`. shape: of a random model.
        precision: "stored" (as in the files), "float32", "bfloat16" or "4bit".
        adapter: "lora", "dora" or "full".
        keep_reference: false where nothing will compare with the starting policy.
        init: folder of a saved adapter to start from.
        reference: see `Policy.reference_is`.
    Raises: ConfigError when the folder, the adapter's targets or its start are wrong.
    """
    policy = open_base(source=source, path=path, shape=shape, seed=seed, revision=revision, precision=precision)
    policy.reference_is, policy.keeps_reference = reference, keep_reference
    if adapter == "full":
        _unfreeze(policy.model)
    else:
        base = {"path": policy.origin.openable, "revision": policy.origin.revision, "precision": precision}
        policy.adapter_config = {
            **add_adapter(policy.model, adapter, rank=rank, scale=scale, dropout=dropout, targets=targets, seed=seed),
            "base_model": base,
        }
    if init is not None:
        policy.load_weights(Path(init).expanduser(), "adapter.init")
    policy.model.eval()
    mx.eval(policy.model.parameters())
    policy.fix_reference()
    return policy


def open_base(
    *, source: str, path: str | None, shape: str | None, seed: int, revision: str | None, precision: str
) -> Policy:
    """The model of `open_policy` as it is before an adapter is put on and before anything is unfrozen."""
    origin = locate(source, path, revision)
    policy = _random(shape or "", seed, origin) if source == "random" else _from_files(source, origin, precision)
    stored = _number_formats(policy.model)
    policy.model, policy.config = with_precision(policy.model, policy.config, precision)
    policy.is_as_stored = _number_formats(policy.model) == stored
    policy.model.eval()
    return policy


def _number_formats(model: nn.Module) -> dict[str, mx.Dtype]:
    """In what numbers each weight is kept."""
    return {name: array.dtype for name, array in tree_flatten(model.parameters())}


def _unfreeze(model: nn.Module) -> None:
    if is_quantised(model):
        raise ConfigError(
            "adapter: got full, which cannot train this model's quantised weights. "
            "Try adapter=lora, or model.precision=bfloat16."
        )
    model.unfreeze()


def _from_files(source: str, origin: Located, precision: str) -> Policy:
    if source == "smollm2":
        folder = converted(
            Path(origin.path), SMOLLM2_SHA256, "4bit" if precision == "stored" else precision, cache_folder()
        )
    else:
        folder = cast(Path, origin.folder)
    try:
        # lazily: weights that will be cast or quantised need not be read twice
        model, config = load_model(folder, lazy=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise ConfigError(f"model.path={folder} cannot be opened by mlx-lm: {error}") from error
    return Policy(model, tokenizer, _eos_ids(folder, config, tokenizer), config, replace(origin, folder=folder))


def _random(shape: str, seed: int, origin: Located) -> Policy:
    config = SHAPES[shape]
    model = Model(ModelArgs.from_dict(config))
    for number, (name, array) in enumerate(tree_flatten(model.parameters())):
        if array.ndim > 1:  # norms keep their ones
            key = mx.random.key(derive_seed(seed, "weights", number))
            scale = array.shape[-1] ** -0.5
            model.load_weights([(name, mx.random.normal(array.shape, scale=scale, key=key))], strict=False)
    tokenizer = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    return Policy(model, tokenizer, frozenset({tokenizer.eos_token_id}), config, origin)


def _eos_ids(folder: Path, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every end mark that the tokenizer or a file names: the loaded config has those of generation_config.json."""
    stored = json.loads((folder / "config.json").read_text())
    ids = {tokenizer.eos_token_id}
    for named in (config, stored, stored.get("text_config", {})):
        value = named.get("eos_token_id")
        ids |= set(value if isinstance(value, list) else [value])
    return frozenset(ids - {None})
