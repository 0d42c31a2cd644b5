"""The lowest versions that pyproject.toml allows of what the package needs, as constraints for pip: `make lowest`.

torch stays as constraints.txt has it.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ("torch",)
EXTRAS = ("frames", "yaml")


def lowest_versions() -> dict[str, str]:
    """The lowest version of each package that is asked for, by its name in lower case."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    matches = [re.fullmatch(r"([\w-]+)>=([\d.]+)", one) for one in asked]
    return {match[1].lower(): match[2] for match in matches if match is not None}


def kept_versions() -> dict[str, str]:
    """The version of each package in constraints.txt, by its name in lower case."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line]
    return {name.lower(): version for name, version in pairs}


def main() -> int:
    """Print the constraints."""
    kept = kept_versions()
    for name, version in lowest_versions().items():
        print(f"{name}=={kept[name] if name in KEPT else version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
