"""Registries of descriptions that a job refers to by name, and to which users may add.

Descriptions of one kind are in one folder, one file each, or several small ones in one file. No other file lists their
names.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pkgutil import iter_modules
from typing import Any, Generic, Protocol, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Described(Protocol):
    """A description with a name and a place in lists."""

    @property
    def name(self) -> str:
        """The name that a job uses."""
        ...

    @property
    def place(self) -> int:
        """The number by which lists are sorted, ascending."""
        ...


T = TypeVar("T", bound=Described)


class Registry(Generic[T]):
    """Descriptions of one kind by name, in the order of their places.

    Descriptions in the package's modules (their attribute FACTS, one or a tuple) are read at the first access, and
    `add` brings others. Modules are imported by the package's name, because some are in rooms above this one. Callers
    must not store a value that depends on all names, because names may be added later.
    """

    def __init__(self, kind: str, package: str, described: type[T]) -> None:
        self.kind = kind
        self._package, self._described = package, described
        self._by_name: dict[str, T] | None = None

    def add(self, facts: T) -> None:
        """Add a description. ValueError if its name is taken."""
        if facts.name in self._all:
            raise ValueError(f"there is {self.kind} {facts.name!r} already")
        self._put({**self._all, facts.name: facts})

    def remove(self, name: str) -> None:
        """Remove a description that was added."""
        self._put({key: facts for key, facts in self._all.items() if key != name})

    @contextmanager
    def also(self, facts: T) -> Iterator[None]:
        """Add a description for the duration of a `with` block."""
        self.add(facts)
        try:
            yield
        finally:
            self.remove(facts.name)

    def __getitem__(self, name: str) -> T:
        return self._all[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._all

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def values(self) -> list[T]:
        """All descriptions."""
        return list(self._all.values())

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return tuple(self._all)

    @property
    def _all(self) -> dict[str, T]:
        if self._by_name is None:
            package = import_module(self._package)
            names = [module.name for module in iter_modules(getattr(package, "__path__", ()))]
            modules = [package, *(import_module(f"{self._package}.{name}") for name in names)]
            attributes = [getattr(module, "FACTS", ()) for module in modules]
            descriptions = chain.from_iterable(
                attribute if isinstance(attribute, tuple) else (attribute,) for attribute in attributes
            )
            self._put({facts.name: facts for facts in descriptions if isinstance(facts, self._described)})
        assert self._by_name is not None
        return self._by_name

    def _put(self, by_name: dict[str, T]) -> None:
        self._by_name = dict(sorted(by_name.items(), key=lambda item: (item[1].place, item[0])))


class NameOf:
    """The mark of a field that holds a name of a registry, of a description for which `where` is true, or one of
    `others`."""

    def __init__(
        self,
        registry: Registry[Any],
        others: tuple[str, ...] = (),
        where: Callable[[Any], bool] = lambda description: True,
    ) -> None:
        self._registry, self._others, self._where = registry, others, where

    @property
    def descriptions(self) -> list[Any]:
        """The descriptions whose names the field may hold."""
        return [description for description in self._registry.values() if self._where(description)]

    @property
    def names(self) -> tuple[str, ...]:
        """All names that the field may hold."""
        return (*self._others, *(description.name for description in self.descriptions))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of a text that is one of the names."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, name: str) -> str:
        if name in self._others or (name in self._registry and self._where(self._registry[name])):
            return name
        *first, last = map(repr, self.names)
        expected = f"{', '.join(first)} or {last}"
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
