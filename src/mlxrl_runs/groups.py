"""Where the config groups live and what they offer. Imports nothing heavy: the help text is made from it."""

from collections.abc import Iterable
from pathlib import Path

NO_CHOICES = ("hydra", "parts")  # Hydra's own, and what the files of other groups are put together from


def conf_folder() -> Path:
    """The folder of config.yaml and the groups: inside an installed package, at the top of a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def group_choices(config_dirs: Iterable[str | Path] = ()) -> dict[str, list[str]]:
    """Every config group with the names that can be chosen in it, extra folders included."""
    choices: dict[str, set[str]] = {}
    for folder in (conf_folder(), *map(Path, config_dirs)):
        for file in folder.glob("*/*.yaml"):
            if file.parent.name not in NO_CHOICES:
                choices.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(choices.items())}
