"""The lowest versions that the package asks for: each has one, and none has a hole that is known."""

import re
import tomllib

import pytest

from support.lowest import EXTRAS, ROOT, kept_versions, lowest_versions

# The first version without a hole through which a file that is read here could do harm.
MENDED = {
    "jinja2": "3.1.6",  # CVE-2025-27516: |attr leads out of the sandbox
    "pyarrow": "23.0.1",  # CVE-2023-47248: an extension type runs code; CVE-2026-25087: use after free in IPC files
    "pydantic": "2.4.0",  # CVE-2024-3772: a pattern that takes exponential time
    "torch": "2.6.0",  # CVE-2025-32434: torch.load runs code under weights_only, too
    "pyyaml": "5.4",  # CVE-2020-14343: full_load runs code
}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def test_every_package_has_a_lowest_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = len(project["dependencies"]) + sum(len(project["optional-dependencies"][extra]) for extra in EXTRAS)
    assert len(lowest_versions()) == asked


@pytest.mark.parametrize("name", MENDED)
def test_no_version_that_is_allowed_has_a_known_hole(name: str) -> None:
    assert numbers(lowest_versions()[name]) >= numbers(MENDED[name])


def test_the_versions_that_tests_ran_with_are_allowed() -> None:
    kept = kept_versions()
    for name, version in lowest_versions().items():
        assert name not in kept or numbers(kept[name]) >= numbers(version)
