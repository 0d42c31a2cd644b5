"""The site is built without a warning, asks no other machine for anything, and has no link that leads nowhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.learn.idea_pages import IDEAS, OTHERS

pytest.importorskip("material", reason="`make site` installs mkdocs-material")
pytest.importorskip("mkdocs_static_i18n")

ROOT = Path(__file__).parents[2]
MOST_BYTES = 15_000_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_there_in_both_languages(site: Path) -> None:
    for language in (".", "zh"):
        assert {file.stem for file in (site / language).glob("*.html")} - {"404"} == {*IDEAS, *OTHERS, "index"}
    assert sum(file.stat().st_size for file in site.rglob("*")) < MOST_BYTES


def test_it_asks_no_other_machine(site: Path) -> None:
    for file in site.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="?(?:https?:)?//[^">]*', text), file
    for file in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//", file.read_text(encoding="utf-8")), file


def test_links_lead_somewhere(site: Path) -> None:
    for file in site.rglob("*.html"):
        if file.stem == "404":  # its links begin at the root of a server
            continue
        for target in re.findall(r'(?:src|href)="?([^"#?>\s]+)', file.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:|//|/", target):
                assert (file.parent / target).exists(), (file, target)
