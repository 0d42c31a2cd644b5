"""Python files whose functions are followed, without running them, to the value that they return.

Followed are assignments to names, attributes and items, return, `if` with a known condition, and calls of other
functions in the files. Other statements (loops, with, try) and calls of other modules are reported with their lines,
and the names that they would set are unknown from there on.
"""

import ast
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.phrase import say
from shardwright.config.units import KIB
from shardwright.interchange.reading.python_expressions import Expressions, Scope
from shardwright.interchange.reading.python_values import ParsedCall, Unread, computed, not_followed, source_of
from shardwright.interchange.reading.shell_words import ShellFault

_MOST_TEXT, _MOST_CALLS = 256 * KIB, 30


@dataclass
class Source:
    """A Python file: its functions, what it imports by the names it uses, and its constants as expressions."""

    name: str
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)  # c -> "a.b.c" for `from a.b import c`
    constants: dict[str, ast.expr] = field(default_factory=dict)

    @property
    def short(self) -> str:
        """The file's name without folders."""
        return PurePath(self.name).name


def source_of_text(name: str, text: str) -> Source:
    """The parsed file. Raises ShellFault."""
    short = PurePath(name).name
    if len(text) > _MOST_TEXT:
        raise ShellFault(
            say(
                "{file} has {count:,} characters, and at most {most:,} of Python are read here",
                file=short,
                count=len(text),
                most=_MOST_TEXT,
            )
        )
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        problem = say("line {line}: {problem}", line=error.lineno, problem=shortened(error.msg, 100))
        raise ShellFault(say("{file} is not valid Python: {problem}", file=short, problem=problem)) from None
    except (ValueError, RecursionError, MemoryError):
        raise ShellFault(
            say("{file} can't be read as Python: it is nested too deep, or has odd characters", file=short)
        ) from None
    source = Source(name)
    for node in tree.body:
        _add(node, source)
    folder = PurePath(name).parent.name
    if folder:  # the package of the file, which relative imports begin with
        source.imports = {
            name_here: folder + path if _is_from_own_folder(path) else path
            for name_here, path in source.imports.items()
        }
    return source


def _is_from_own_folder(path: str) -> bool:
    """True if an import is relative to the file's own folder."""
    return path.startswith(".") and not path.startswith("..")


def _add(node: ast.stmt, source: Source) -> None:
    if isinstance(node, ast.FunctionDef):
        source.functions[node.name] = node
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        source.imports |= imports_of(node)
    elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        source.constants[node.targets[0].id] = node.value
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
        source.constants[node.target.id] = node.value
    elif isinstance(node, ast.If):  # imports within `if TYPE_CHECKING` and the like
        for inner_node in (*node.body, *node.orelse):
            if isinstance(inner_node, (ast.Import, ast.ImportFrom)):
                _add(inner_node, source)


def imports_of(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """The names that an import binds, and their full paths; a relative path begins with dots."""
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.partition(".")[0]: (alias.asname and alias.name) or alias.name.partition(".")[0]
            for alias in node.names
        }
    prefix = "." * node.level + (f"{node.module}." if node.module else "")
    return {alias.asname or alias.name: prefix + alias.name for alias in node.names}


class Reader:
    """The files of a configuration, and notes about statements that are not followed.

    `environment` has the known variables of the environment. Calls of functions named in `unexpanded` are not followed,
    since the call itself is needed. `makers` return the results of library functions.
    """

    def __init__(
        self,
        sources: list[Source],
        environment: Mapping[str, str],
        unexpanded: Container[str] = (),
        makers: Mapping[str, Callable[[list[Any], dict[str, Any]], ParsedCall]] | None = None,
    ) -> None:
        self.sources, self.environment, self.unexpanded, self.makers = sources, environment, unexpanded, makers or {}
        self.notes: list[str] = []
        self.depth = 0
        self._called: list[tuple[str, str]] = []  # (file, name) of the functions that are being followed
        self.expressions = Expressions(self)

    def find(self, name: str, module: str = "") -> Source | None:
        """The file that defines a function: one whose path fits `module`, else the first in which it is not being
        followed; None if no file does."""
        candidates = [source for source in self.sources if name in source.functions and name not in self.unexpanded]
        parts = [part for part in module.split(".") if part and part != "config_registry"]
        fitting = [
            source for source in candidates if parts and parts[-1] in (*PurePath(source.name).with_suffix("").parts,)
        ]
        others = [source for source in candidates if not (parts and (source.name, name) in self._called)]
        return next(iter([*fitting, *others]), None)

    def call(self, source: Source, name: str, positional: list[Any], keywords: dict[str, Any]) -> Any:
        """The value that a function of a file returns. Raises ShellFault if calls are nested too deeply."""
        function = source.functions[name]
        if self.depth >= _MOST_CALLS:
            raise ShellFault(
                say(
                    "{file}: functions that call each other, more than {most} deep", file=source.short, most=_MOST_CALLS
                )
            )
        self.depth += 1
        self._called.append((source.name, name))
        scope = Scope(source, self._arguments(source, function, positional, keywords))
        returned = self._block(function.body, scope)
        self._called.pop()
        self.depth -= 1
        return returned[0] if returned else None

    def note(self, source: Source, node: ast.AST, text: str) -> None:
        """Report, once, code that is not followed."""
        line = getattr(node, "lineno", 0)
        note = say("{file}, line {line}: {problem}", file=source.short, line=line, problem=text)
        if note not in self.notes:
            self.notes.append(note)

    def _arguments(
        self, source: Source, function: ast.FunctionDef, positional: list[Any], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        declared = function.args
        names = [parameter.arg for parameter in (*declared.posonlyargs, *declared.args)]
        scope = Scope(source, {})
        arguments: dict[str, Any] = {}
        for name, default in zip(reversed(names), reversed(declared.defaults), strict=False):
            arguments[name] = self.expressions.value(default, scope)
        for parameter, keyword_default in zip(declared.kwonlyargs, declared.kw_defaults, strict=True):
            if keyword_default is not None:
                arguments[parameter.arg] = self.expressions.value(keyword_default, scope)
        arguments |= dict(zip(names, positional, strict=False))
        known = {*names, *(parameter.arg for parameter in declared.kwonlyargs)}
        arguments |= {name: value for name, value in keywords.items() if name in known}
        if declared.kwarg:
            arguments[declared.kwarg.arg] = {name: value for name, value in keywords.items() if name not in known}
        return arguments

    def _block(self, body: list[ast.stmt], scope: Scope) -> list[Any]:
        """Follow statements in their order. A list with the returned value, or empty if they do not return."""
        for node in body:
            self.expressions.step()
            if isinstance(node, ast.Return):
                return [self.expressions.value(node.value, scope) if node.value else None]
            if isinstance(node, ast.If):
                if returned := self._if(node, scope):
                    return returned
            else:
                self._statement(node, scope)
        return []

    def _if(self, node: ast.If, scope: Scope) -> list[Any]:
        truth = self.expressions.truth(node.test, scope)
        if truth is not None:
            return self._block(node.body if truth else node.orelse, scope)
        self.note(scope.source, node, say("{code} can't be known here", code=f"if {source_of(node.test)}"))
        self._forget([*node.body, *node.orelse], scope)
        return []

    def _forget(self, body: list[ast.stmt], scope: Scope) -> None:
        """Mark the names that statements would set as unknown, because the statements are not followed."""
        for node in (inner for statement in body for inner in ast.walk(statement)):
            self.expressions.step()
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._put(target, self.expressions.unread(node.value, scope), scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        value = self.expressions.value
        if isinstance(node, ast.Assign):
            new_value = value(node.value, scope)
            for target in node.targets:
                self._put(target, new_value, scope)
        elif isinstance(node, ast.AnnAssign) and node.value:
            self._put(node.target, value(node.value, scope), scope)
        elif isinstance(node, ast.AugAssign):
            try:
                new_value = computed(type(node.op), value(node.target, scope), value(node.value, scope))
            except ValueError:
                new_value = self.expressions.unread(node, scope)
            self._put(node.target, new_value, scope)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            scope.imports |= imports_of(node)
        elif isinstance(node, ast.FunctionDef):
            scope.values.pop(node.name, None)
        elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            new_value = value(node.value, scope)
            if isinstance(new_value, (ParsedCall, Unread)):
                self.note(scope.source, node, not_followed(source_of(node.value)))
        elif not isinstance(node, (ast.Expr, ast.Pass, ast.Assert, ast.ClassDef, ast.AnnAssign)):
            kind = type(node).__name__.lower()
            self.note(scope.source, node, say("a statement ({kind}) is not followed", kind=kind))
            self._forget([node], scope)

    def _put(self, target: ast.expr, value: Any, scope: Scope) -> None:
        """Assign a value to a name, to an attribute of a ParsedCall, or to an item."""
        if isinstance(target, ast.Name):
            scope.values[target.id] = value
            return
        if isinstance(target, ast.Tuple) and isinstance(value, list) and len(value) == len(target.elts):
            for element, item in zip(target.elts, value, strict=True):
                self._put(element, item, scope)
            return
        if isinstance(target, ast.Attribute):
            holder = self.expressions.holder(target.value, scope)
            if isinstance(holder, ParsedCall):
                holder.keywords[target.attr] = value
                return
        elif isinstance(target, ast.Subscript):
            holder, key = self.expressions.holder(target.value, scope), self.expressions.value(target.slice, scope)
            is_index = isinstance(holder, list) and isinstance(key, int) and -len(holder) <= key < len(holder)
            if is_index or (isinstance(holder, dict) and isinstance(key, str)):
                holder[key] = value
                return
        self.note(scope.source, target, not_followed(f"{source_of(target)} = {_shown(value)}"))


def _shown(value: Any) -> str:
    return shortened(str(value), 40) if not isinstance(value, (ParsedCall, Unread, list, dict)) else "..."
