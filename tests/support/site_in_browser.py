"""Opens every page of a site in a headless Chromium, wide and narrow, light and dark: `make site-check`.

    PYTHONPATH=tests python -m support.site_in_browser build/site             # say what is wrong
    PYTHONPATH=tests python -m support.site_in_browser build/site shots zero  # and picture pages named like "zero"

A page is wrong if there is an error or a warning on the console, a request to another machine or for a file that is not
there, something wider than the window, or a playable figure that did not come alive.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from support.browser import CHROMIUM, started_chromium, watched_page

WIDTHS = (1400, 390)
SCHEMES = ("light", "dark")
# The theme asks each language for one of these, and goes on without it.
OPTIONAL = "sitemap.xml"


class QuietFiles(SimpleHTTPRequestHandler):
    """Serves files and says nothing; of an optional file that is missing it sends an empty one."""

    def handle(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # a browser that opens the next page stops listening
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (as http.server calls it)
        pass

    def do_GET(self) -> None:
        if self.path.endswith(OPTIONAL):
            self.send_response(200)
            self.send_header("Content-Type", "text/xml")
            self.end_headers()
            self.wfile.write(b"<urlset/>")
            return
        super().do_GET()


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of a site on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietFiles, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


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
