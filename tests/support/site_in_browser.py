"""Opens every page of a site in a headless Chromium, wide and narrow, light and dark: `make site-check`.

    PYTHONPATH=tests python -m support.site_in_browser build/site             # say what is wrong
    PYTHONPATH=tests python -m support.site_in_browser build/site shots zero  # and picture pages named like "zero"

A page is wrong if there is an error or a warning on the console, a request to another machine or for a file that is not
there, something wider than the window, or a playable figure that did not come alive.
"""

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from support.browser import CHROMIUM, started_chromium, watched_page

WIDTHS = (1400, 390)
SCHEMES = ("light", "dark")

# The picture and the numbers of the figure of a control; they stay in the browser, for a picture may be long.
_PICTURE = """const picture = (one) => [
    ...one.closest("figure.playable").querySelectorAll(".playable-picture, dl")
].map((part) => part.innerHTML).join("");"""
# Brings a control into the middle of the window and gives it the focus: its value, if that is the last, and its place.
_BEGIN = f"""one => {{
  {_PICTURE}
  one.scrollIntoView({{ block: "center" }});
  one.focus();
  one.before = picture(one);
  const {{ left, width, top, height }} = one.getBoundingClientRect();
  const last = one.max ?? one.options?.[one.options.length - 1].value;
  return [one.value, one.value === last, left, width, top + height / 2];
}}"""
# Says whether the picture is another one since then, and gives the control the value that it had.
_RESET = f"""(one, value) => {{
  {_PICTURE}
  const isAnother = picture(one) !== one.before;
  one.value = value;
  one.dispatchEvent(new Event(one.type === "range" ? "input" : "change"));
  return isAnother;
}}"""


class QuietFiles(SimpleHTTPRequestHandler):
    """Serves files, which a browser may keep, and says nothing; in place of some it sends others."""

    def __init__(self, *args: Any, instead: Mapping[str, bytes], **options: Any) -> None:
        self._instead = instead  # what is sent in place of files, by the end of their paths
        super().__init__(*args, **options)

    def handle(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # a browser that opens the next page stops listening
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (as http.server calls it)
        pass

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "max-age=3600")
        super().end_headers()

    def do_GET(self) -> None:
        sent = next((content for end, content in self._instead.items() if self.path.endswith(end)), None)
        if sent is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(sent)


@contextmanager
def served(site: Path, is_searched: bool = True) -> Iterator[str]:
    """The address of a site on this machine. Each page reads the index of all words and sorts it, which takes half of
    its time; where nobody searches the index is empty."""
    instead = {} if is_searched else _no_words(site)
    handler = partial(QuietFiles, directory=str(site), instead=instead)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def _no_words(site: Path) -> dict[str, bytes]:
    """The index of a site without its words."""
    (file,) = site.glob("search/*.json")
    index = json.loads(file.read_text(encoding="utf-8"))
    return {file.name: json.dumps(index | {"config": index["config"] | {"lang": ["en"]}, "docs": []}).encode()}


def page_names(site: Path) -> list[str]:
    """The pages of a site, as addresses within it."""
    return sorted(str(file.relative_to(site)) for file in site.rglob("*.html") if file.stem != "404")


def opened(page: Page, address: str) -> None:
    """Open a page, which must fit the window, with its playable figures alive."""
    page.goto(address)
    marked = page.evaluate("() => [...document.querySelectorAll('img[data-figure]')].map((one) => one.dataset.figure)")
    assert not marked, f"{address}: {marked} did not come alive"
    wide, window = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= window, f"{address}: {wide} px in a window of {window}"


def operate(page: Page, taps: bool) -> int:
    """Operate each control of each playable figure, and see that its picture changes: by keyboard; or by taps, where
    the browser's own list of values is left to the browser. The number of figures."""
    figures = page.query_selector_all("figure.playable")
    for figure in figures:
        for control in figure.query_selector_all("input" if taps else "select, input"):
            start, is_last, left, width, middle = control.evaluate(_BEGIN)
            if not width:  # of a figure without moments
                continue
            if taps:
                page.touchscreen.tap(left + 1 if is_last else left + width - 1, middle)
            else:
                page.keyboard.press("Home" if is_last else "End")
            assert control.evaluate(_RESET, start), f"{page.url}: a control changes nothing"
        button = figure.query_selector(".playable-player:not([hidden]) button")
        if button is not None:
            for _ in ("play", "pause"):
                name = button.inner_text()
                _, _, left, width, middle = button.evaluate(_BEGIN)
                page.touchscreen.tap(left + width / 2, middle) if taps else page.keyboard.press(" ")
                assert button.inner_text() != name, f"{page.url}: the button does nothing"
    return len(figures)


def options(width: int, scheme: str) -> dict[str, Any]:
    """The options of a browser's context."""
    return {"viewport": {"width": width, "height": 900}, "color_scheme": scheme, "has_touch": width < 600}


def complaints(site: Path, shots: Path | None, word: str) -> Iterator[str]:
    """A line for each page and window in which something is wrong. `shots` is a folder for pictures of pages whose
    names have `word`."""
    with started_chromium() as browser, served(site) as address:
        for width in WIDTHS:
            for scheme in SCHEMES:
                for name in page_names(site):
                    try:
                        with watched_page(browser, (address, "data:", "blob:"), **options(width, scheme)) as page:
                            opened(page, address + name)
                            if shots is not None and word in name:
                                file = f"{name.removesuffix('.html').replace('/', '-')}-{width}-{scheme}.png"
                                page.screenshot(path=shots / file, full_page=True)
                    except AssertionError as error:
                        yield f"{width} px, {scheme}, {name}: {str(error).splitlines()[0]}"


def main() -> int:
    """Check the site; 0 if nothing is wrong."""
    if CHROMIUM is None:
        print("there is no chromium; apt-get install chromium")
        return 1
    site, shots = Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None
    wrong = list(complaints(site, shots, sys.argv[3] if len(sys.argv) > 3 else ""))
    print(*wrong or [f"nothing to complain of on {len(page_names(site))} pages"], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
