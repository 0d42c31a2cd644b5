"""Chromium for tests of pages, in which nothing may go wrong and nothing may be asked of another machine."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEEDS_CHROMIUM = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; apt-get install chromium"),
]


@contextmanager
def started_chromium() -> Iterator[Browser]:
    """A browser without a window."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@contextmanager
def watched_page(browser: Browser, addresses: tuple[str, ...], **options: Any) -> Iterator[Page]:
    """A page that may ask for `addresses` alone, by how they begin. `options` are those of a browser's context.

    At its end it fails if there was an error, a warning or another request, and says on which page.
    """
    context = browser.new_context(**options)
    shown, wrong = context.new_page(), list[tuple[str, str]]()
    shown.on("console", lambda one: one.type in ("error", "warning") and wrong.append((shown.url, one.text)))
    shown.on("pageerror", lambda error: wrong.append((shown.url, str(error))))
    shown.on("request", lambda asked: asked.url.startswith(addresses) or wrong.append((shown.url, asked.url)))
    yield shown
    context.close()
    assert not wrong, wrong
