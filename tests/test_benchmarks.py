"""Benchmarks are run by hand: what they import from the package and from each other is still there."""

import ast
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
FILES = sorted(FOLDER.rglob("*.py"))


def names_at(file: Path) -> set[str]:
    """The names that a file defines, imports or sets at its top."""
    result = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            result.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            result.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            result |= {alias.asname or alias.name for alias in node.names}
    return result


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_what_is_imported_is_there(file: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        beside = file.parent / f"{node.module}.py"
        if node.module.startswith("shardwright"):
            module = importlib.import_module(node.module)
            missing += [f"{node.module}.{a.name}" for a in node.names if not hasattr(module, a.name)]
        elif beside.exists():
            known = names_at(beside)
            missing += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in known]
    assert missing == []
