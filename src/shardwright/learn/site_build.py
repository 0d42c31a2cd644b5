"""Hooks of mkdocs: marks the pictures that can be played, and writes the figures and their player into the site."""

import re
import shutil
from functools import cache
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

from shardwright.config.text_columns import is_wide
from shardwright.learn.idea_pages import LANGUAGES, PAGES, language_of
from shardwright.learn.playable_figure import PLAYER_WORDS, script_of
from shardwright.learn.playable_figures import PLAYABLE

PLAYER = Path(__file__).parent / "player"
FOLDER = "play"  # of the site
_LEAST_LETTER_PX = 11.0  # of a picture in a wide window; player/figure.css has the share of it that phones show
# Outputs are columns that count a wide character as two; fonts of code have it 1.7 times as wide.
_OUTPUT = re.compile(r'<div class="language-text highlight">.*?</div>', re.DOTALL)
_PICTURE = re.compile(r'(<img\b[^>]*\bsrc="[^"]*figures/(?P<name>[a-z0-9-]+)\.svg")')


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """The content of a page: wide characters of outputs and playable pictures are marked, scripts have their data."""
    html = _OUTPUT.sub(lambda output: _wide_marked(output[0]), html)
    language = language_of(page.url)
    html = _PICTURE.sub(lambda picture: f'{picture[1]} style="--least: {_least_px(picture["name"], language)}px"', html)
    names = [name for name in dict.fromkeys(match["name"] for match in _PICTURE.finditer(html)) if name in PLAYABLE]
    if not names:
        return html
    up = "../" * page.url.count("/")
    scripts = [f"{up}{FOLDER}/{name}.{language}.js" for name in ("words", *names)]
    marked = _PICTURE.sub(
        lambda match: f'{match[1]} data-figure="{match["name"]}"' if match["name"] in names else match[1], html
    )
    return marked + "".join(f'<script src="{script}"></script>' for script in scripts)


def _least_px(name: str, language: str) -> int:
    """The width that a picture needs to be read: its smallest letters are then as large as letters have to be."""
    text = (PAGES / language / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    width = float(re.findall(r'viewBox="0 0 ([\d.]+)', text)[0])
    smallest = min(map(float, re.findall(r'font-size="([\d.]+)', text)))
    return ceil(width * _LEAST_LETTER_PX / smallest)


def _wide_marked(output: str) -> str:
    runs = ((wide, "".join(run)) for wide, run in groupby(output, is_wide))
    return "".join(f'<span class="wide">{run}</span>' if wide else run for wide, run in runs)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write the player, and the data of each figure in each language."""
    folder = Path(config["site_dir"]) / FOLDER
    if folder.exists():  # each language is a build of its own
        return
    shutil.copytree(PLAYER, folder)
    for name, data in _figures().items():
        for language in LANGUAGES:
            (folder / f"{name}.{language}.js").write_text(script_of(name, data, language), encoding="utf-8")


@cache
def _figures() -> dict[str, Any]:
    """The data of all figures, and the words of the player."""
    return {"words": PLAYER_WORDS} | {name: figure.data() for name, figure in PLAYABLE.items()}
