"""The site, built once for all tests of it, in whichever processes they run."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a built site."""
    pytest.importorskip("material", reason="`make site` installs mkdocs-material")
    pytest.importorskip("mkdocs_static_i18n")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all processes of the suite
    folder = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first builds, and the others wait
        if not folder.exists():
            _build(shared / "building").rename(folder)
    return folder


def _build(folder: Path) -> Path:
    """The same folder, with a site that was built without a warning."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder
