"""The values of expressions of Python files, as far as they are known (python_values.py), within limits."""

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwright.config.phrase import say
from shardwright.interchange.reading.python_values import (
    Named,
    ParsedCall,
    Unread,
    called_plainly,
    compared,
    computed,
    is_constant,
    is_number,
    is_of_type,
    is_plain,
    not_followed,
    source_of,
    text_by_method,
)
from shardwright.interchange.reading.shell_marks import UNKNOWN, mark
from shardwright.interchange.reading.shell_words import ShellFault

if TYPE_CHECKING:
    from shardwright.interchange.reading.python_source import Reader, Source

_MOST_STEPS, _MOST_LEVELS = 50_000, 60
_COPIERS = ("deepcopy", "copy", "replace")


@dataclass
class Scope:
    """The scope of names: the file, and the local values and imports of a function in it."""

    source: "Source"
    values: dict[str, Any]
    imports: dict[str, str] = field(default_factory=dict)


class Expressions:
    """An evaluator of expressions. Each expression counts as a step, and the number of steps is limited."""

    def __init__(self, reader: "Reader") -> None:
        self.reader, self.steps, self.depth = reader, 0, 0
        self._open: set[tuple[str, str]] = set()  # (file, name) of constants that are being evaluated

    def step(self) -> None:
        """Count a step. Raises ShellFault if there are too many."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise ShellFault(
                say("more than {most:,} expressions are followed in it; check that it is the file", most=_MOST_STEPS)
            )

    def unread(self, node: ast.AST, scope: Scope) -> Unread:
        """The mark of an unknown value."""
        line = getattr(node, "lineno", 0)
        return Unread(source_of(node), say("{file}, line {line}", file=scope.source.short, line=line))

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression; an Unread if it is unknown. Raises ShellFault if it is nested too deeply."""
        self.step()
        if self.depth > _MOST_LEVELS * 4:
            raise ShellFault(
                say("{file}: expressions nested too deep; check that it is the file", file=scope.source.short)
            )
        self.depth += 1
        try:
            return self._value(node, scope)
        except ValueError as error:
            if isinstance(error, ShellFault):
                raise
            return self.unread(node, scope)
        finally:
            self.depth -= 1

    def _value(self, node: ast.expr, scope: Scope) -> Any:
        match node:
            case ast.Constant():
                return node.value if is_constant(node.value) else self.unread(node, scope)
            case ast.Name():
                return self._name(node, scope)
            case ast.Attribute():
                return self._attribute(self.value(node.value, scope), node, scope)
            case ast.List() | ast.Tuple():
                return [self.value(item, scope) for item in node.elts]
            case ast.Dict():
                return self._dict(node, scope)
            case ast.Subscript():
                return self._item(node, scope)
            case ast.Call():
                return self._call(node, scope)
            case ast.BinOp():
                return computed(type(node.op), self.value(node.left, scope), self.value(node.right, scope))
            case ast.UnaryOp():
                return self._unary(node, scope)
            case ast.IfExp():
                truth = self.truth(node.test, scope)
                if truth is None:
                    return self.unread(node, scope)
                return self.value(node.body if truth else node.orelse, scope)
            case ast.BoolOp() | ast.Compare():
                truth = self.truth(node, scope)
                return self.unread(node, scope) if truth is None else truth
        return self.unread(node, scope)

    def truth(self, node: ast.expr, scope: Scope) -> bool | None:
        """True if a condition holds; None if that is unknown."""
        if isinstance(node, ast.BoolOp):
            deciding = isinstance(node.op, ast.Or)
            truths = [self.truth(operand, scope) for operand in node.values]
            return deciding if deciding in truths else None if None in truths else not deciding
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            negated = self.truth(node.operand, scope)
            return None if negated is None else not negated
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.value(node.left, scope), self.value(node.comparators[0], scope)
            try:
                return compared(type(node.ops[0]), left, right)
            except ValueError:
                return None
        if isinstance(node, ast.Compare):
            return None
        value = self.value(node, scope)
        return bool(value) if is_plain(value) else None

    def holder(self, node: ast.expr, scope: Scope) -> Any:
        """The object whose field or item is assigned. A missing field becomes a ParsedCall without a callee: a default
        with changes."""
        if isinstance(node, ast.Attribute):
            outer = self.holder(node.value, scope)
            if isinstance(outer, ParsedCall):
                return outer.keywords.setdefault(node.attr, ParsedCall(""))
        return self.value(node, scope)

    def _name(self, node: ast.Name, scope: Scope) -> Any:
        if node.id in scope.values:
            return scope.values[node.id]
        key = (scope.source.name, node.id)
        if node.id in scope.source.constants and key not in self._open:
            self._open.add(key)
            try:
                return self.value(scope.source.constants[node.id], Scope(scope.source, {}))
            finally:
                self._open.discard(key)
        return Named(scope.imports.get(node.id) or scope.source.imports.get(node.id) or node.id)

    def _attribute(self, outer: Any, node: ast.Attribute, scope: Scope) -> Any:
        if isinstance(outer, Named):
            return Named(f"{outer.text}.{node.attr}"[:1000])
        if isinstance(outer, ParsedCall) and node.attr in outer.keywords:
            return outer.keywords[node.attr]
        return self.unread(node, scope)

    def _dict(self, node: ast.Dict, scope: Scope) -> Any:
        items: dict[str, Any] = {}
        for key, value_node in zip(node.keys, node.values, strict=True):
            value = self.value(value_node, scope)
            if key is None:
                if not isinstance(value, dict):
                    return self.unread(node, scope)
                items |= value
                continue
            name = self.value(key, scope)
            if not isinstance(name, str):
                return self.unread(node, scope)
            items[name] = value
        return items

    def _item(self, node: ast.Subscript, scope: Scope) -> Any:
        outer, key = self.value(node.value, scope), self.value(node.slice, scope)
        if isinstance(outer, Named) and outer.last in self.reader.makers:  # a table of a library
            return self.reader.makers[outer.last]([key], {})
        if isinstance(outer, Named) and outer.text == "os.environ" and isinstance(key, str):
            return self.reader.environment.get(key, mark(key))
        is_index = isinstance(outer, list) and isinstance(key, int) and -len(outer) <= key < len(outer)
        if is_index or (isinstance(outer, dict) and isinstance(key, str) and key in outer):
            return outer[key]
        return self.unread(node, scope)

    def _unary(self, node: ast.UnaryOp, scope: Scope) -> Any:
        if isinstance(node.op, ast.Not):
            truth = self.truth(node, scope)
            return self.unread(node, scope) if truth is None else truth
        operand = self.value(node.operand, scope)
        if isinstance(node.op, (ast.USub, ast.UAdd)) and is_number(operand):
            return -operand if isinstance(node.op, ast.USub) else operand
        return self.unread(node, scope)

    def _call(self, node: ast.Call, scope: Scope) -> Any:
        if isinstance(node.func, ast.Attribute):
            outer = self.value(node.func.value, scope)
            if isinstance(outer, str) and not (node.args or node.keywords or UNKNOWN.search(outer)):
                return text_by_method(node.func.attr, outer)
            called = self._attribute(outer, node.func, scope)
        else:
            called = self.value(node.func, scope)
        positional = [self.value(argument, scope) for argument in node.args]
        keywords: dict[str, Any] = {}
        for argument in node.keywords:
            value = self.value(argument.value, scope)
            if argument.arg is not None:
                keywords[argument.arg] = value
            elif isinstance(value, dict):
                keywords |= value
            else:
                self.reader.note(scope.source, node, not_followed(f"**{source_of(argument.value)}"))
        if not isinstance(called, Named):
            return self.unread(node, scope)
        return self._call_result(called, positional, keywords, node, scope)

    def _call_result(
        self, called: Named, positional: list[Any], keywords: dict[str, Any], node: ast.Call, scope: Scope
    ) -> Any:
        if called.text in ("os.environ.get", "os.getenv") and positional and isinstance(positional[0], str):
            return self._variable(positional, keywords)
        if called.last == "cast" and len(positional) == 2:
            return positional[1]
        if called.last in _COPIERS and positional and isinstance(positional[0], ParsedCall):
            original = positional[0] if called.last == "replace" else self._copy(positional[0])
            return ParsedCall(original.callee, original.keywords | keywords, original.positional)
        if called.last in self.reader.makers:
            return self.reader.makers[called.last](positional, keywords)
        source = self._source_of_call(called, scope)
        if source is not None:
            return self.reader.call(source, called.last, positional, keywords)
        marks = [argument for argument in positional if isinstance(argument, str) and UNKNOWN.fullmatch(argument)]
        if called.text in ("int", "float", "str") and marks:
            return marks[0]
        try:
            if called.text == "isinstance" and len(positional) == 2:
                return is_of_type(*positional)
            return called_plainly(called.text, positional, keywords)
        except ValueError:
            return ParsedCall(called.text, keywords, positional)

    def _copy(self, value: Any, depth: int = 0) -> Any:
        """A deep copy. An object that occurs several times is copied, and counts as steps, each time."""
        self.step()
        if depth > _MOST_LEVELS:
            raise ShellFault(say("a copy of what is nested too deep; check that it is the file"))
        if isinstance(value, ParsedCall):
            return ParsedCall(
                value.callee, self._copy(value.keywords, depth + 1), self._copy(value.positional, depth + 1)
            )
        if isinstance(value, list):
            return [self._copy(item, depth + 1) for item in value]
        if isinstance(value, dict):
            return {name: self._copy(item, depth + 1) for name, item in value.items()}
        return value

    def _source_of_call(self, called: Named, scope: Scope) -> "Source | None":
        """The file that defines a function: the file of the scope, or the one that the name is imported from."""
        if called.text in scope.source.functions and called.text not in self.reader.unexpanded:
            return scope.source
        module, dot, name = called.text.rpartition(".")
        return self.reader.find(name, module) if dot else None

    def _variable(self, positional: list[Any], keywords: dict[str, Any]) -> Any:
        """The value of os.environ.get(): the variable of the environment, or its default."""
        name = positional[0]
        default = positional[1] if len(positional) > 1 else keywords.get("default")
        if name not in self.reader.environment and default is not None:
            self.reader.notes.append(
                say("nobody set {name}, so its default holds: {default}", name=name, default=str(default)[:40])
            )
            return default
        return self.reader.environment.get(name, mark(name))
