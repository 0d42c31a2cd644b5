"""What commands compute before they say it, computed once for all that ask the same in a process.

A page shows a command's output in two languages, and a test its text and its JSON: the search or prediction behind them
is the same. All that a result depends on is in the arguments of these functions, so another question is computed anew.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from shardwright.api import asked_job, estimated, explained, found_plans, scaled
from shardwright.measure import validate
from shardwright.planner.advice import repair
from shardwright.planner.search import objectives

COMPUTED = (
    (asked_job, "_best_job"), (estimated, "estimated"), (explained, "Explained"), (found_plans, "found_plans"),
    (scaled, "scaled"), (validate, "validate"), (objectives, "search"), (repair, "search"),
)  # fmt: skip
_results: dict[tuple[Any, str], Any] = {}


@contextmanager
def computed_once() -> Iterator[None]:
    """Within the block functions of COMPUTED return what they returned for the same arguments."""
    with ExitStack() as patches:
        for module, name in COMPUTED:
            patches.enter_context(mock.patch.object(module, name, partial(_once, getattr(module, name))))
        yield


def _once(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of a function, kept by the text of its arguments, unless one of them is known by its place alone."""
    asked = {name: value for name, value in options.items() if name != "memo"}  # which changes no price
    key = (function, repr((args, asked)))
    if " at 0x" in key[1]:
        return function(*args, **options)
    if key not in _results:
        _results[key] = function(*args, **options)
    result = _results[key]
    return dict(result) if isinstance(result, dict) else result  # a command takes parts out of such a one
