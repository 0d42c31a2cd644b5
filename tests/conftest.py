"""Settings and fixtures of all tests."""

import gc
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

# Whose functions start processes, or run what ranks do.
_STARTING = (
    "support.ranks",
    "support.cases",
    "support.experts_run",
    "support.compressed",
    "support.few_plans",
    "support.forked_commands",
    "fuzz.plans",
    "click.testing",
)

# The same by the text of a module: one of these is imported at its top, and not only constants from it.
_STARTS = re.compile(
    rf"^(?:from|import) (?:subprocess|{'|'.join(map(re.escape, _STARTING))})\b(?! import [A-Z_, ]+$)", re.MULTILINE
)

# And that all tests of a module compute for long.
_ALL_MARKED = {"processes": _STARTS, "long": re.compile(r"^pytestmark = \[?pytest\.mark\.long\b", re.MULTILINE)}

# Machines that run tests are busy: how long one example takes says nothing. Of the examples of a property that names
# no number of its own, half are drawn in `make test`.
settings.register_profile("all cases", deadline=None, max_examples=100)
settings.register_profile("shardwright", deadline=None, max_examples=50)
settings.load_profile("shardwright")

# Tests run on all cores at once. Threads of torch beside them would spin while they wait for a core; some tests took
# five times their CPU time. Before anything imports torch, and commands that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Texts are as wide as the terminal; tests read them as in a pipe, however wide the terminal of their runner is.
with suppress(ImportError):
    import readline  # noqa: F401 (when it is imported it sets COLUMNS for the processes that tests start)
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")  # os.environ does not know what readline has set
# And commands speak the language of the locale, which tests expect to be English.
for _name in ("LC_ALL", "LC_MESSAGES", "LANG"):
    if os.environ.get(_name, "").lower().startswith("zh"):
        os.environ[_name] = "C.UTF-8"

# Ranks and commands inherit this as well. Each message between ranks wakes a thread. If that takes the core from the
# sender at once, the sender still holds its connection's lock, and its own thread for arrivals spins on it: half of a
# rank's system time. A batch process waits for its turn instead.
with suppress(AttributeError, OSError):  # Linux has it, and a sandbox may refuse
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


# Where the suite runs in the background or under nohup, it ignores some signals, and commands would inherit that: tests
# that send them would wait for ever. A handler that does nothing is not inherited.
for _number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


# Imports of the tests, and the tests themselves, are no garbage: nobody looks for cycles among them, neither
# while they are made nor at each of the many later looks at all that there is.
gc.disable()


def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores, for some tests wait: for ranks, signals and commands."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    """Have cycles be looked for among what tests make. And searches use no further core, for tests use all of them, and
    a fork of a process that has run many tests copies much; tests/planner/test_forked_copies.py has them use more."""
    from shardwright.planner.search import forked_copies

    forked_copies._MOST = 1
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """All cases of tests that are otherwise sampled: `make test-all`."""
    parser.addoption("--all-cases", action="store_true", help="of tests marked as sampled, too")


def pytest_configure(config: pytest.Config) -> None:
    """All examples of properties, too, where all cases are asked for."""
    if config.getoption("--all-cases", default=False):
        settings.load_profile("all cases")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import modules of which no test is wanted: half the time to collect `make test-fast`."""
    unwanted = [mark for name, mark in _ALL_MARKED.items() if f"not {name}" in str(config.getoption("-m"))]
    if not unwanted or not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if any(mark.search(text) for mark in unwanted) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of modules that start ranks or commands: `make test-fast` leaves these out. Of the cases of a test
    that is marked as `sampled(n)` keep one in n."""
    for item in items:
        module = getattr(item, "module", None)
        if module is not None and _starts_processes(module):
            item.add_marker(pytest.mark.processes)
    if config.getoption("--all-cases") or any("[" in asked for asked in config.args):  # who names a case gets it
        return
    seen, kept, left_out = Counter[tuple[str, str]](), [], list[pytest.Item]()
    for item in items:
        marker, test = item.get_closest_marker("sampled"), (str(item.path), getattr(item, "originalname", item.name))
        number, one_in = seen[test], 1 if marker is None else marker.args[0]
        seen[test] += 1
        # One of each n that follow each other, and not always the same of them, which could mean one value of a grid.
        (kept if (number + number // one_in) % one_in == 0 else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@cache
def _starts_processes(module: ModuleType) -> bool:
    """True if a module of tests names something that starts processes."""
    return any(value is subprocess or _comes_from(value) in _STARTING for value in vars(module).values())


@pytest.fixture(scope="session", autouse=True)
def _computed_in_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder that all processes of this run share, for tests/support/computed_once.py."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "computed"
    folder.mkdir(exist_ok=True)
    os.environ["SHARDWRIGHT_TESTS_COMPUTED"] = str(folder)


@pytest.fixture
def searched_once() -> Iterator[None]:
    """One search for a question that several tests of a run ask, or one test as text and as JSON."""
    from support.computed_once import computed_once

    with computed_once():
        yield


def _comes_from(value: object) -> str:
    """The module that a name of a test module is from, or is."""
    return str(getattr(value, "__module__", None) or getattr(value, "__name__", ""))
