"""Named models, clusters, devices and jobs, a TOML file each."""

import difflib
import tomllib
from importlib import resources
from typing import Any, Literal

Kind = Literal["models", "clusters", "devices", "jobs", "software", "calibrations"]


def names(kind: Kind) -> list[str]:
    """Catalog names of one kind, sorted."""
    folder = resources.files(__package__) / kind
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read(kind: Kind, name: str) -> dict[str, Any]:
    """The fields of one entry, its name among them. KeyError with the nearest names if there is none."""
    if name not in names(kind):
        raise KeyError(f"{name!r} is not in the catalog of {kind}; {did_you_mean(name, names(kind))}")
    text = (resources.files(__package__) / kind / f"{name}.toml").read_text(encoding="utf-8")
    return {"name": name} | tomllib.loads(text)


def did_you_mean(word: str, known: list[str]) -> str:
    """A way out of a name that is not known."""
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(near) + "?"
    return "there are: " + ", ".join(known)
