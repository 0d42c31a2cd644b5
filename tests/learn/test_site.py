"""The site is built without a warning, asks no other machine for anything, and has no link that leads nowhere."""

import re
from pathlib import Path

import pytest

from shardwright.learn.idea_figures import FIGURES
from shardwright.learn.idea_pages import IDEAS, OTHERS
from support.learn_pages import figure_file

MOST_BYTES = 15_000_000


pytestmark = pytest.mark.long  # the site is built


def test_every_page_is_there_in_both_languages(site: Path) -> None:
    for language in (".", "zh"):
        assert {file.stem for file in (site / language).glob("*.html")} - {"404"} == {*IDEAS, *OTHERS, "index"}
    assert sum(file.stat().st_size for file in site.rglob("*")) < MOST_BYTES


def test_chinese_pages_show_the_chinese_pictures(site: Path) -> None:
    for name in FIGURES:
        assert (site / "zh" / "figures" / f"{name}.svg").read_bytes() == figure_file(name, "zh").read_bytes()
    for file in (site / "zh").glob("*.html"):
        targets = re.findall(r'<img[^>]+src="?([^">\s]*figures/[^">\s]+)', file.read_text(encoding="utf-8"))
        assert all(target.startswith("figures/") for target in targets), (file, targets)


def test_it_asks_no_other_machine(site: Path) -> None:
    for file in site.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="?(?:https?:)?//[^">]*', text), file
    assert list(site.glob("play/*.js"))
    for file in site.rglob("play/*.js"):
        assert "//" not in file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "").replace("// ", "")
    for file in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//", file.read_text(encoding="utf-8")), file


def test_links_lead_somewhere(site: Path) -> None:
    for file in site.rglob("*.html"):
        if file.stem == "404":  # its links begin at the root of a server
            continue
        for target in re.findall(r'(?:src|href)="?([^"#?>\s]+)', file.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:|//|/", target):
                assert (file.parent / target).exists(), (file, target)
