"""The house keeps its rules: names, sizes and sentences, by reading the source."""

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

import shardwright

SOURCE = Path(shardwright.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES, MOST_OF_A_FUNCTION = 400, 60
LEANING = re.compile(r"(The same|What|Whether|Which|That of|Those|All of (it|them)|Of|By|As|In|With|From which)\b")


@dataclass(frozen=True)
class Definition:
    """A function or a class of a file, by its name, with its lines and docstring."""

    file: str
    kind: type[ast.AST]
    name: str
    num_lines: int
    docstring: str | None
    parameters: tuple[str, ...]


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[str]:
    """The parameters of a function, without the first of a method."""
    if isinstance(node, ast.ClassDef):
        return
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    yield from names[names[:1] in (["self"], ["cls"], ["ctx"]) :]


@dataclass(frozen=True)
class Module:
    """A file of the source: its docstring, if it has one, its functions and classes, the names that it binds, and what
    of it runs code that a file brings along."""

    file: str
    docstring: str | None
    definitions: tuple[Definition, ...]
    bindings: frozenset[str]
    running: frozenset[str]


@cache
def modules() -> tuple[Module, ...]:
    """The source. Each file is parsed once, for it takes most of the time of these tests."""
    return tuple(module_of(str(file.relative_to(SOURCE)), file.read_text(encoding="utf-8")) for file in FILES)


def module_of(file: str, source: str) -> Module:
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    definitions = tuple(
        Definition(
            file, type(node), node.name, (node.end_lineno or 0) - node.lineno, ast.get_docstring(node),
            tuple(parameters(node)),
        )
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    )  # fmt: skip
    bindings, running = frozenset(bindings_of(nodes)), frozenset(calls_that_run_code(nodes))
    return Module(file, ast.get_docstring(tree), definitions, bindings, running)


def definitions() -> Iterator[Definition]:
    """Every function and class of the source."""
    for module in modules():
        yield from module.definitions


# Words that no variable or parameter is called: they say nothing of what it holds.
VAGUE = {"found", "of", "cut", "said", "theirs", "ours"}


def bindings_of(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The names that a module's statements and functions bind."""
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_a_binding_says_what_it_holds() -> None:
    assert not {f"{module.file}: {name}" for module in modules() for name in module.bindings & VAGUE}


# Tables that read better by hand, and functions of many parameters. These numbers may only become smaller.
NUM_UNFORMATTED = 43
NUM_OF_MANY_PARAMETERS = 8
MOST_PARAMETERS = 6


def test_layout_by_hand_is_for_tables() -> None:
    number = sum(file.read_text(encoding="utf-8").count("# fmt: skip") for file in FILES)
    assert number == NUM_UNFORMATTED, "more are not allowed; of fewer take the new number"


def test_a_function_takes_few_parameters() -> None:
    """One that needs more takes a dataclass."""
    many = [f"{one.file}:{one.name}" for one in definitions() if len(one.parameters) > MOST_PARAMETERS]
    assert len(many) == NUM_OF_MANY_PARAMETERS, f"more are not allowed; of fewer take the new number: {many}"


def test_a_file_and_a_function_are_read_at_once() -> None:
    assert {str(f) for f in FILES if f.read_text(encoding="utf-8").count("\n") > MOST_LINES} == set()
    long = {
        f"{one.file}:{one.name}"
        for one in definitions()
        if one.kind is not ast.ClassDef and one.num_lines >= MOST_OF_A_FUNCTION
    }
    assert not long


def test_a_module_has_a_name_of_its_own() -> None:
    named = defaultdict(list)
    for file in FILES:
        if file.stem not in ("__init__", "__main__"):
            named[file.stem].append(str(file.relative_to(SOURCE)))
    # Facts are on the ground, and their arithmetic is beside the model or what is updated: two files of one name.
    pairs = (
        ("config/gates", "model/gates"),
        ("config/optimizers", "parallel/optimizers"),
        ("parallel/compress", "sharding/compressions"),
    )
    paired = {name for name, files in named.items() if tuple(file.rpartition("/")[0] for file in files) in pairs}
    assert {name: files for name, files in named.items() if len(files) > 1 and name not in paired} == {}


def test_a_class_has_a_name_of_its_own() -> None:
    named = defaultdict(set)
    for one in definitions():
        if one.kind is ast.ClassDef:
            named[one.name].add(one.file)
    assert {name for name, files in named.items() if len(files) > 1} == set()


def test_a_docstring_stands_by_itself() -> None:
    """It begins with a noun or a verb, and does not lean on the one above."""
    leaning = [
        f"{one.file}:{one.name}: {one.docstring.splitlines()[0]}"
        for one in definitions()
        if one.docstring and LEANING.match(one.docstring)
    ]
    leaning += [
        f"{one.file}: {one.docstring.splitlines()[0]}"
        for one in modules()
        if one.docstring and LEANING.match(one.docstring)
    ]
    assert leaning == []


# A sentence that begins so hides its subject. Questions may, for they end with their mark.
WITHOUT_SUBJECT = re.compile(r"(?:^|[.:!?][)'`]? |[-*] |\()((?:What|Whether|That of|Those of)\b[^.?]*(?:[.?]|$))")


def prose_of(source: str) -> Iterator[str]:
    """The paragraphs of a file's docstrings and of other strings that are statements, and the lines of its comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from re.split(r"\n\s*\n", node.value.value)
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#:")


def without_subject(source: str) -> list[str]:
    """The sentences of a file's docstrings and comments that do not begin with their subject."""
    if not re.search(r"\b(What|Whether|That of|Those of)\b", source):  # most files, which need not be parsed
        return []
    sentences = [one for text in prose_of(source) for one in WITHOUT_SUBJECT.findall(" ".join(text.split()))]
    return [sentence for sentence in sentences if not sentence.endswith("?")]


def test_a_sentence_begins_with_its_subject() -> None:
    """Readers whose first language is another look for it there."""
    root = SOURCE.parent.parent
    files = [file for folder in ("src", "tests", "benchmarks", "examples") for file in (root / folder).rglob("*.py")]
    assert len(files) > 1000
    texts = {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}
    assert {name: sentences for name, text in texts.items() if (sentences := without_subject(text))} == {}


@pytest.mark.parametrize(
    ("source", "sentences"),
    [
        ('"""What it holds."""', ["What it holds."]), ('x = 1\n"""A number. Those of\n    two."""', ["Those of two."]),
        ("x = 1  # Whether it is one", ["Whether it is one"]), ("# It is. That of x is not.", ["That of x is not."]),
        ('"""A file.\n\n    use it\n\nWhat is not there is made.\n"""', ["What is not there is made."]),
        ('"""What is it? A number."""', []), ('x = "What it holds."  # Whatever it is, what it holds.', []),
    ],
)  # fmt: skip
def test_a_sentence_without_its_subject_is_seen(source: str, sentences: list[str]) -> None:
    assert without_subject(source) == sentences


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


def test_no_mark_of_a_merge_is_left() -> None:
    """Pages and catalogs of phrases are no code: nothing else would see such a line in them."""
    mark, kinds = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE), {".md", ".po", ".py", ".toml", ".js", ".csv", ".css"}
    root = SOURCE.parent.parent
    files = [file for folder in ("src", "docs", "tests", "benchmarks") for file in (root / folder).rglob("*.*")]
    texts = [file for file in (*files, *root.glob("*.md")) if file.suffix in kinds]
    assert len(texts) > 500
    assert [str(file) for file in texts if mark.search(file.read_text(encoding="utf-8", errors="replace"))] == []


# Functions that run code which a file brings along, by their name or the end of it; and uses that read no file.
RUNNING = (
    "pickle.load", "pickle.loads", "pickle.Unpickler", "pickle.*", "marshal.*", "shelve.*", "dill.*", "joblib.*",
    "cloudpickle.*", "torch.load", "torch.hub.load", "torch.jit.load", "torch.package.PackageImporter", "np.load",
    "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec", "compile", "__import__",
    "FileSystemReader", "FsspecReader", "from_pretrained", "runpy.*", "importlib.util.*",
)  # fmt: skip
WITHOUT_A_FILE = {
    ("report/timeline/study.py", "eval"),  # formulas of the registry of schedules
    ("train/launch/launch.py", "pickle.dumps"),
    ("planner/search/forked_copies.py", "pickle.dump"),
    ("planner/search/forked_copies.py", "pickle.load"),  # of a pipe that only a copy of this process has
}
# Pickles of weights are read by torch's reader of tensors alone, which that file says.
OF_TENSORS_ALONE = {("train/checkpoint/pickled_weights.py", "torch.load")}
UNSAFE_OPTIONS = {"allow_pickle": True, "weights_only": False, "trust_remote_code": True}


def runs_code(name: str) -> bool:
    """True if a function of that name is one of RUNNING."""
    module = name.rpartition(".")[0] + ".*"
    return any(name == one or module == one or ("." not in one and name.endswith(f".{one}") and one[0].isupper())
               for one in RUNNING)  # fmt: skip


def full_name(node: ast.expr) -> str:
    """The text of what is called. Most are plain names, for which `ast.unparse` would take longer than all the rest."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{full_name(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def calls_that_run_code(nodes: Sequence[ast.AST]) -> set[str]:
    """The calls, imports and options of a module that run code which a file brings along."""
    result = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            name = full_name(node.func)
            result |= {name} if runs_code(name) else set()
            result |= {
                f"{name}({option.arg})"
                for option in node.keywords
                if option.arg in UNSAFE_OPTIONS
                and not (isinstance(option.value, ast.Constant) and option.value.value != UNSAFE_OPTIONS[option.arg])
            }
        if isinstance(node, ast.ImportFrom):
            result |= {full for alias in node.names if runs_code(full := f"{node.module}.{alias.name}")}
    return result


def test_no_file_is_read_by_what_runs_code() -> None:
    """No pickle but of tensors alone, no code of a model or data set: files of strangers are data."""
    result = {(module.file, call) for module in modules() for call in module.running}
    assert result == WITHOUT_A_FILE | OF_TENSORS_ALONE
    for file, call in OF_TENSORS_ALONE:
        calls = [node for node in ast.walk(ast.parse((SOURCE / file).read_text("utf-8"))) if isinstance(node, ast.Call)]
        options = [ast.unparse(option) for node in calls if ast.unparse(node.func) == call for option in node.keywords]
        assert "weights_only=True" in options


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path)", "from pickle import loads", "np.load(path, allow_pickle=flag)", "eval(text)",
        "x.Model.from_disk(name, trust_remote_code=True)", "dcp.load({}, storage_reader=dcp.FileSystemReader(path))",
    ],
)  # fmt: skip
def test_what_runs_code_is_seen(source: str) -> None:
    assert module_of("", source).running
