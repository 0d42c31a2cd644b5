"""Files that a command writes, where there is no room for them."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardwright.report.output import write_output


@contextmanager
def little_room(num_bytes: int) -> Iterator[None]:
    """A context in which no file of this process can become larger."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_has_no_room_keeps_its_text_and_a_new_one_leaves_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    write_output(old, "# A job that was written here\n", "--toml")
    for path in (old, new):
        with little_room(4096), pytest.raises(OSError, match=r"(?i)file (size limit|too large)"):
            write_output(path, "# A job that was written here\n" + "x = 1\n" * 2000, "--toml")
    assert old.read_text() == "# A job that was written here\n" and not new.exists()
