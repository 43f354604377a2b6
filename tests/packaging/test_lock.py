import re
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_lock_names_no_host_but_pypis():
    hosts = set(re.findall(r"https?://([^/\"]+)", (ROOT / "uv.lock").read_text()))
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


def test_the_lock_was_made_from_this_pyproject():
    # name and range of every dependency, extras and all; "uv lock" puts a stale lock right
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(chain(project["dependencies"], *project["optional-dependencies"].values()))
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    [ours] = [package for package in lock["package"] if package["name"] == "mlxrl-runs"]
    locked = {(entry["name"], ranges(entry.get("specifier", ""))) for entry in ours["metadata"]["requires-dist"]}
    assert {name_and_range(text) for text in wanted} == locked


def name_and_range(requirement):
    name, rest = re.match(r"([\w.-]+)(?:\[[\w,]+\])?([^;]*)", requirement).groups()
    return name, ranges(rest)


def ranges(text):
    return frozenset(part.strip() for part in text.split(",") if part.strip())
