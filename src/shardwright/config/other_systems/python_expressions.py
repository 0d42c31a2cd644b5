"""Expressions of Python files, each to its value as far as that is known (python_values.py), and at most so many."""

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwright.config.other_systems.python_values import (
    Made,
    Named,
    Unread,
    called_plainly,
    compared,
    computed,
    is_constant,
    is_number,
    is_plain,
    source_of,
)
from shardwright.config.other_systems.shell_values import UNKNOWN, mark
from shardwright.config.other_systems.shell_words import ShellFault

if TYPE_CHECKING:
    from shardwright.config.other_systems.python_source import Reader, Source

_MOST_STEPS, _MOST_DEEP = 50_000, 60
_COPIES = ("deepcopy", "copy", "replace")


@dataclass
class Scope:
    """Where names are looked up: the values of a function, and its file."""

    source: "Source"
    values: dict[str, Any]
    imports: dict[str, str] = field(default_factory=dict)


class Expressions:
    """Values of expressions. Each counts as a step, and the steps are limited."""

    def __init__(self, reader: "Reader") -> None:
        self.reader, self.steps, self.deep = reader, 0, 0
        self._open: set[tuple[str, str]] = set()  # constants that are being read

    def step(self) -> None:
        """Count one. Raises ShellFault."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise ShellFault(f"more than {_MOST_STEPS:,} expressions are followed in it; check that it is the file")

    def unread(self, node: ast.AST, scope: Scope) -> Unread:
        """That a value is not known."""
        return Unread(source_of(node), f"{scope.source.short}, line {getattr(node, 'lineno', 0)}")

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression. Raises ShellFault where it is nested too deep."""
        self.step()
        if self.deep > _MOST_DEEP * 4:
            raise ShellFault(f"{scope.source.short}: expressions nested too deep; check that it is the file")
        self.deep += 1
        try:
            return self._value(node, scope)
        except ValueError as error:
            if isinstance(error, ShellFault):
                raise
            return self.unread(node, scope)
        finally:
            self.deep -= 1

    def _value(self, node: ast.expr, scope: Scope) -> Any:
        match node:
            case ast.Constant():
                return node.value if is_constant(node.value) else self.unread(node, scope)
            case ast.Name():
                return self._name(node, scope)
            case ast.Attribute():
                return self._attribute(node, scope)
            case ast.List() | ast.Tuple():
                return [self.value(one, scope) for one in node.elts]
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
                says = self.truth(node.test, scope)
                if says is None:
                    return self.unread(node, scope)
                return self.value(node.body if says else node.orelse, scope)
            case ast.BoolOp() | ast.Compare():
                says = self.truth(node, scope)
                return self.unread(node, scope) if says is None else says
        return self.unread(node, scope)

    def truth(self, node: ast.expr, scope: Scope) -> bool | None:
        """True if a condition holds; None where that is not known."""
        if isinstance(node, ast.BoolOp):
            ends = isinstance(node.op, ast.Or)
            says = [self.truth(one, scope) for one in node.values]
            return ends if ends in says else None if None in says else not ends
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand, scope)
            return None if inner is None else not inner
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self.value(node.left, scope), self.value(node.comparators[0], scope)
            try:
                return compared(type(node.ops[0]), left, right)
            except ValueError:
                return None
        value_of_node = self.value(node, scope) if not isinstance(node, ast.Compare) else None
        return bool(value_of_node) if is_plain(value_of_node) and not isinstance(node, ast.Compare) else None

    def holder(self, node: ast.expr, scope: Scope) -> Any:
        """The object into which a field or an item is put: a missing field is its default, with changes."""
        if isinstance(node, ast.Attribute):
            outer = self.holder(node.value, scope)
            if isinstance(outer, Made):
                return outer.values.setdefault(node.attr, Made(""))
        return self.value(node, scope)

    def _name(self, node: ast.Name, scope: Scope) -> Any:
        if node.id in scope.values:
            return scope.values[node.id]
        key = (scope.source.name, node.id)
        if node.id in scope.source.constants and key not in self._open:
            self._open.add(key)
            try:
                return self.value(scope.source.constants[node.id], type(scope)(scope.source, {}))
            finally:
                self._open.discard(key)
        return Named(scope.imports.get(node.id) or scope.source.imports.get(node.id) or node.id)

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        outer = self.value(node.value, scope)
        if isinstance(outer, Named):
            return Named(f"{outer.text}.{node.attr}"[:1000])
        if isinstance(outer, Made) and node.attr in outer.values:
            return outer.values[node.attr]
        return self.unread(node, scope)

    def _dict(self, node: ast.Dict, scope: Scope) -> Any:
        items: dict[str, Any] = {}
        for key, one in zip(node.keys, node.values, strict=True):
            value = self.value(one, scope)
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
        if isinstance(outer, Named) and outer.text == "os.environ" and isinstance(key, str):
            return self.reader.environment.get(key, mark(key))
        is_place = isinstance(outer, list) and isinstance(key, int) and -len(outer) <= key < len(outer)
        if is_place or (isinstance(outer, dict) and isinstance(key, str) and key in outer):
            return outer[key]
        return self.unread(node, scope)

    def _unary(self, node: ast.UnaryOp, scope: Scope) -> Any:
        if isinstance(node.op, ast.Not):
            says = self.truth(node, scope)
            return self.unread(node, scope) if says is None else says
        value_of_it = self.value(node.operand, scope)
        if isinstance(node.op, (ast.USub, ast.UAdd)) and is_number(value_of_it):
            return -value_of_it if isinstance(node.op, ast.USub) else value_of_it
        return self.unread(node, scope)

    def _call(self, node: ast.Call, scope: Scope) -> Any:
        called = self.value(node.func, scope)
        placed = [self.value(one, scope) for one in node.args]
        named: dict[str, Any] = {}
        for one in node.keywords:
            value = self.value(one.value, scope)
            if one.arg is not None:
                named[one.arg] = value
            elif isinstance(value, dict):
                named |= value
            else:
                self.reader.note(scope.source, node, f"**{source_of(one.value)} is not followed")
        if not isinstance(called, Named):
            return self.unread(node, scope)
        return self._made(called, placed, named, node, scope)

    def _made(self, called: Named, placed: list[Any], named: dict[str, Any], node: ast.Call, scope: Scope) -> Any:
        if called.text in ("os.environ.get", "os.getenv") and placed and isinstance(placed[0], str):
            return self._variable(placed, named)
        if called.last == "cast" and len(placed) == 2:
            return placed[1]
        if called.last in _COPIES and placed and isinstance(placed[0], Made):
            taken = placed[0] if called.last == "replace" else self._copied(placed[0])
            return Made(taken.maker, taken.values | named, taken.placed)
        if called.last in self.reader.makers:
            return self.reader.makers[called.last](placed, named)
        source = self._defining(called, scope)
        if source is not None:
            return self.reader.call(source, called.last, placed, named)
        marked = [one for one in placed if isinstance(one, str) and UNKNOWN.fullmatch(one)]
        if called.text in ("int", "float", "str") and marked:
            return marked[0]
        try:
            return called_plainly(called.text, placed, named)
        except ValueError:
            return Made(called.text, named, placed)

    def _copied(self, value: Any, deep: int = 0) -> Any:
        """All of a value anew. What stands in it several times counts several times."""
        self.step()
        if deep > _MOST_DEEP:
            raise ShellFault("a copy of what is nested too deep; check that it is the file")
        if isinstance(value, Made):
            return Made(value.maker, self._copied(value.values, deep + 1), self._copied(value.placed, deep + 1))
        if isinstance(value, list):
            return [self._copied(one, deep + 1) for one in value]
        if isinstance(value, dict):
            return {name: self._copied(one, deep + 1) for name, one in value.items()}
        return value

    def _defining(self, called: Named, scope: Scope) -> "Source | None":
        """The file that has a function: this one, or the one that it is imported from."""
        if called.text in scope.source.functions and called.text not in self.reader.kept:
            return scope.source
        module, point, name = called.text.rpartition(".")
        return self.reader.find(name, module) if point else None

    def _variable(self, placed: list[Any], named: dict[str, Any]) -> Any:
        """A variable of the environment, or its default."""
        name = placed[0]
        default = placed[1] if len(placed) > 1 else named.get("default")
        if name not in self.reader.environment and default is not None:
            self.reader.notes.append(f"nobody set {name}, so its default holds: {str(default)[:40]}")
            return default
        return self.reader.environment.get(name, mark(name))
