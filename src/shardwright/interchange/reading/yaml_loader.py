"""PyYAML's safe loader with a limit on merge keys. It imports PyYAML, which is an optional dependency.

`<<: [*a, *a]` copies the pairs of other mappings into a mapping. PyYAML does so while it parses, before the result can
be checked: ten references to ten pairs, repeated on eight levels, make 10^9 pairs of a few hundred characters.
"""

from typing import Any

import yaml

from shardwright.config.phrase import say
from shardwright.config.toml_file import MOST_VALUES
from shardwright.interchange.reading.shell_marks import mark

_MERGE = "tag:yaml.org,2002:merge"
_OWN_TAG = "!"  # of a program's own tags, such as !include, whose values only it can know


def load_yaml(text: str) -> Any:
    """The plain values of a YAML document. Raises yaml.YAMLError, or ValueError and the like for an invalid value."""
    loader = BoundedLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def load_documents(text: str) -> list[Any]:
    """The plain values of each document of a YAML. Raises as load_yaml does."""
    loader = BoundedLoader(text)
    documents: list[Any] = []
    try:
        while loader.check_data():
            documents.append(loader.get_data())
    finally:
        loader.dispose()
    return documents


class BoundedLoader(yaml.SafeLoader):  # PyYAML has no types
    """A loader that refuses merge keys that would make more than MOST_VALUES values."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_merged = 0
        self._merging: set[int] = set()

    def flatten_mapping(self, node: Any) -> None:
        """Copy the pairs of merged mappings into a node. Raises ConstructorError if there are too many."""
        if id(node) in self._merging:
            raise self._fault(say("a mapping that merges itself"), node)
        self._merging.add(id(node))
        for merged in _merged_by(node):
            self.flatten_mapping(merged)  # now its pairs can be counted
            self._num_merged += len(merged.value)
            if self._num_merged > MOST_VALUES:
                problem = say("merge keys (<<) that make more than {most:,} values", most=MOST_VALUES)
                raise self._fault(problem, node)
        self._merging.remove(id(node))
        super().flatten_mapping(node)

    @staticmethod
    def _fault(problem: str, node: Any) -> Exception:
        error: Exception = yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return error


def _merged_by(node: Any) -> list[Any]:
    """The mappings that the merge keys of a mapping refer to."""
    values = [value for key, value in node.value if key.tag == _MERGE]
    listed = [
        merged for value in values for merged in (value.value if isinstance(value, yaml.SequenceNode) else [value])
    ]
    return [merged for merged in listed if isinstance(merged, yaml.MappingNode)]


def _unknown_value(loader: BoundedLoader, suffix: str, node: Any) -> str:
    """The mark of a value with a tag of a program's own."""
    return mark(suffix or _OWN_TAG)


BoundedLoader.add_multi_constructor(_OWN_TAG, _unknown_value)
