"""The house keeps its rules: names, sizes and sentences, by reading the source."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwright

SOURCE = Path(shardwright.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES, MOST_OF_A_FUNCTION = 400, 60
LEANING = re.compile(r"(The same|Those|Of|By|As|In|With|From which)\b")


def parsed() -> Iterator[tuple[str, ast.AST]]:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            yield str(file.relative_to(SOURCE)), node


def test_a_file_and_a_function_are_read_at_once() -> None:
    assert {str(f) for f in FILES if f.read_text(encoding="utf-8").count("\n") > MOST_LINES} == set()
    long = {
        f"{file}:{node.name}"
        for file, node in parsed()
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= MOST_OF_A_FUNCTION
    }
    assert not long


def test_a_module_has_a_name_of_its_own() -> None:
    named = defaultdict(list)
    for file in FILES:
        if file.stem not in ("__init__", "__main__"):
            named[file.stem].append(str(file.relative_to(SOURCE)))
    assert {name: files for name, files in named.items() if len(files) > 1} == {}


def test_a_class_has_a_name_of_its_own() -> None:
    named = defaultdict(set)
    for file, node in parsed():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            named[node.name].add(file)
    assert {name for name, files in named.items() if len(files) > 1} == set()


@pytest.mark.parametrize("kind", [ast.FunctionDef, ast.ClassDef], ids=["functions", "classes"])
def test_a_docstring_stands_by_itself(kind: type[ast.FunctionDef] | type[ast.ClassDef]) -> None:
    """It begins with a noun or a verb, and does not lean on the one above."""
    leaning = [
        f"{file}:{node.name}: {text.splitlines()[0]}"
        for file, node in parsed()
        if isinstance(node, kind) and (text := ast.get_docstring(node)) and LEANING.match(text)
    ]
    assert leaning == []


def test_files_that_the_source_names_exist() -> None:
    """By their name alone, or from a folder of the package or of the project on."""
    names, root = {file.name for file in FILES}, SOURCE.parent.parent
    missing = [
        f"{file.relative_to(SOURCE)} names {path}"
        for file in FILES
        for path in re.findall(r"(?<![\w/.-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b", file.read_text(encoding="utf-8"))
        if path not in names and not any((place / path).exists() for place in (SOURCE, root))
    ]
    assert missing == []
