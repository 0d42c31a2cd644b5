"""Generations of software that the catalog describes: a framework's in a month, and those that many people run."""

from collections.abc import Iterable
from functools import lru_cache

from shardwright.config import catalog
from shardwright.config.software import SoftwareSpec, software_of


def generation_of(framework: str, month: str, is_compiled: bool = False, without: frozenset[str] = frozenset()) -> str:
    """The catalog name of a framework's generation in a month such as 2023-10, without a month of the newest. Software
    may be named by its catalog name, too. Nothing if the catalog does not describe it. Entries in `without` are taken
    not to be in the catalog."""
    specs = [spec for name in catalog.names("software") if framework in (spec := software_of(name)).frameworks]
    specs = [spec for spec in specs if spec.compiled in (is_compiled, None)] or specs
    is_entry = framework in catalog.names("software") and framework not in without
    return nearest_generation(specs, month, without) or (framework if is_entry else "")


def nearest_generation(specs: Iterable[SoftwareSpec], month: str, without: frozenset[str]) -> str:
    """The name of the newest of several generations that had begun by a month; if none is so old, the oldest.

    For a month of an entry in `without` it is the one whose time is nearest, before or after. Nothing if all are in it.
    """
    generations = sorted((spec.since, spec.name) for spec in specs)
    there = [entry for entry in generations if entry[1] not in without]
    before = [entry for entry in there if not month or entry[0] <= month]
    after = there[len(before) :]
    if not (before and after):
        return there[len(before) - 1 if before else 0][1] if there else ""
    gap = [since for since, _ in generations if before[-1][0] < since <= month]
    is_nearer = gap and months(after[0][0]) - months(month) < months(month) - months(gap[0])
    return after[0][1] if is_nearer else before[-1][1]


def months(month: str) -> int:
    """The months of our era before a month such as 2023-10."""
    year, _, number = month.partition("-")
    return 12 * int(year) + int(number)


@lru_cache(maxsize=1)
def usual_software() -> tuple[str, ...]:
    """The catalog names of software that many people run."""
    return tuple(name for name in catalog.names("software") if software_of(name).is_usual)
