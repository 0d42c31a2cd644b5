"""Results of commands, computed once for all that ask the same in a run of the tests.

A page shows a command's output in two languages, and a test its text and its JSON: the search or prediction behind them
is the same. All that a result depends on is in the arguments of these functions, so another question is computed anew.

Processes of the suite share what took long by files in a folder that lives as long as one run of it: what they compute
follows from the sources of that run, and nothing older is ever read.
"""

import fcntl
import hashlib
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
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
FOLDER = "SHARDWRIGHT_TESTS_COMPUTED"  # the variable with the folder that the processes of a run share
_OF_SPEED = ("memo", "on_first")  # options that change no result: what is remembered, and who begins beside a search
_LONG_S = 0.2  # what took less is computed again sooner than read
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
    asked = {name: value for name, value in options.items() if name not in _OF_SPEED}
    key = (function, repr((args, asked)))
    if " at 0x" in key[1]:
        return function(*args, **options)
    if key not in _results:
        _results[key] = _shared(f"{function.__module__} {function.__qualname__} {key[1]}", function, *args, **options)
    result = _results[key]
    return dict(result) if isinstance(result, dict) else result  # a command takes parts out of such a one


def _shared(key: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result that another process of this run has kept, or computes now; else that of the function, kept."""
    if not (folder := os.environ.get(FOLDER)):
        return function(*args, **options)
    file = Path(folder) / hashlib.sha256(key.encode()).hexdigest()
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first computes, and the others wait
        if file.exists():
            return pickle.loads(file.read_bytes())
        begin_s = time.monotonic()
        result = function(*args, **options)
        if time.monotonic() - begin_s > _LONG_S:
            with suppress(pickle.PicklingError, TypeError, AttributeError):  # what is known to this process alone
                file.write_bytes(pickle.dumps(result))
        return result
