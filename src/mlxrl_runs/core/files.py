"""Folders that are whole or not there: written aside, named in a manifest, renamed."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST = "manifest.json"


@contextmanager
def written_aside(final: Path) -> Iterator[Path]:
    """A new folder to write into that becomes `final` when nothing went wrong, and is never half of it."""
    aside = final.with_name(final.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    for file in aside.iterdir():
        _sync(file)
    aside.rename(final)
    _sync(final.parent)


def write_manifest(folder: Path) -> None:
    """Name every file of `folder` with its size and hash; a folder without a manifest is not complete."""
    files = {}
    for file in sorted(folder.iterdir()):
        files[file.name] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n")


def has_all_its_files(folder: Path) -> bool:
    """True when a manifest is there and every file it names has its size."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def one_process_at_a_time(place: Path) -> Iterator[None]:
    """Inside, no other process that asks for the same `place` goes on; its folder is made when it is missing."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.with_name(place.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by a process that dies
        yield


def sha256_of(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
