"""Registries of things that a job names and that somebody may add.

Each thing is described in a file of its own, all in one folder, or several small ones in one file. Nobody else lists
their names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pkgutil import iter_modules
from typing import Any, Generic, Protocol, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Described(Protocol):
    """A description with a name, and with its place among the others."""

    @property
    def name(self) -> str:
        """The name that a job gives."""
        ...

    @property
    def place(self) -> int:
        """Lists show it after those with smaller numbers."""
        ...


T = TypeVar("T", bound=Described)


class Registry(Generic[T]):
    """Descriptions of one kind by name, in the order of their places.

    Descriptions in the package's modules (their attribute FACTS, one or a tuple) are read when the first is asked for,
    and `add` brings others. Modules are imported by the package's name, because some stand in rooms above this one.
    Nobody may keep a value that depends on all names, because names may be added later.
    """

    def __init__(self, kind: str, package: str, described: type[T]) -> None:
        self.kind = kind
        self._package, self._described = package, described
        self._by_name: dict[str, T] | None = None

    def add(self, facts: T) -> None:
        """Bring another one. ValueError where its name is taken."""
        if facts.name in self._all:
            raise ValueError(f"there is {self.kind} {facts.name!r} already")
        self._put({**self._all, facts.name: facts})

    def remove(self, name: str) -> None:
        """Take away one that was added."""
        self._put({known: facts for known, facts in self._all.items() if known != name})

    @contextmanager
    def also(self, facts: T) -> Iterator[None]:
        """Have another one for as long as this lasts."""
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
            facts = [getattr(module, "FACTS", ()) for module in modules]
            each = chain.from_iterable(some if isinstance(some, tuple) else (some,) for some in facts)
            self._put({one.name: one for one in each if isinstance(one, self._described)})
        assert self._by_name is not None
        return self._by_name

    def _put(self, by_name: dict[str, T]) -> None:
        self._by_name = dict(sorted(by_name.items(), key=lambda item: (item[1].place, item[0])))


class NameOf:
    """Marks a field that holds a name of a registry."""

    def __init__(self, registry: Registry[Any]) -> None:
        self.registry = registry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Text that is one of the names."""
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def _known(self, name: str) -> str:
        if name in self.registry:
            return name
        *others, last = map(repr, self.registry)
        expected = f"{', '.join(others)} or {last}"
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
