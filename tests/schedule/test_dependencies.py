"""Dependencies of computations: the one table, against the words of the papers, and that there is no second one."""

import re
from pathlib import Path

import pytest

import shardwright
from shardwright.schedule.action import parse
from shardwright.schedule.dependencies import MAKES, MESSAGES, NEEDS, TRAVELS, Product
from shardwright.schedule.lowering.lower import lower
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import looped

SOURCE = Path(shardwright.__file__).parent


def test_the_table_says_what_the_papers_say() -> None:
    """GPipe and 1F1B: F after the F before, B after the B behind; zero bubble: I as B, and W after its I."""
    needs = {kind.value: {(need.product.name, need.stage) for need in of} for kind, of in NEEDS.items()}
    assert needs["F"] == {("OUTPUT", -1)}
    assert needs["B"] == needs["I"] == {("OUTPUT", 0), ("GRADIENT", 1)}
    assert needs["C"] == {("OUTPUT", 0)} and needs["W"] == {("GRADIENT", 0)}
    assert {product.name: stages for product, stages in TRAVELS.items()} == {"OUTPUT": 1, "GRADIENT": -1}
    assert set(MAKES.values()) == set(MESSAGES) == set(Product)


@pytest.mark.parametrize("before", ["0W0", "0B0", "0C0", "1F0"])
def test_what_comes_too_early_never_runs(before: str) -> None:
    """On one rank: an action before what it needs stops for ever, and lowering says where."""
    row = tuple(map(parse, (before, "0F0", "1F0", "1I0", "0I0", "1W0", "0W0")))
    with pytest.raises(ValueError, match=f"rank 0 can't run {before}"):
        lower(Schedule("wrong", 1, looped(1, 2), (row,)))


def test_there_is_no_second_table() -> None:
    """Which stage a product comes from or goes to is said here; the executor alone moves it, with tensors."""
    pattern = re.compile(r"\bstage\s*[-+]\s*1\b(?!\])")  # not the end of a slice of stages
    allowed = {"parallel/pipeline/executor.py", "schedule/dependencies.py"}
    result = {
        str(file.relative_to(SOURCE))
        for folder in ("schedule", "simulate", "account", "report", "parallel")
        for file in (SOURCE / folder).rglob("*.py")
        if pattern.search(file.read_text(encoding="utf-8")) and "Kind." in file.read_text(encoding="utf-8")
    }
    assert result <= allowed
