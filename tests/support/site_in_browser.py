"""Opens every page of a site in a headless Chromium, wide and narrow: `make site-check`.

    python tests/support/site_in_browser.py build/site

All pages are frames of one page. Names of other machines lead nowhere: a request to one is a line on the console.
"""

import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (1400, 390)
PATIENCE_S = 600
# The theme asks each language for one of these, and goes on without it.
OPTIONAL = "sitemap.xml"


class _Server(SimpleHTTPRequestHandler):
    """Serves files, and notes what was not there."""

    missing: list[str] = []  # noqa: RUF012 (one list for all requests)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (as http.server calls it)
        pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if not self.path.endswith(OPTIONAL):
            self.missing.append(self.path)
        super().send_error(code, message, explain)


def complaints(site: Path, browser: str, width: int) -> list[str]:
    """The lines of the console, and the files that were asked for and are not there."""
    frames = site / "frames.html"
    pages = sorted(file.relative_to(site) for file in site.rglob("*.html") if file.stem not in ("404", "frames"))
    tags = "".join(f'<iframe src="{page}" width="{width}" height="600"></iframe>' for page in pages)
    frames.write_text(f'<!doctype html><link rel="icon" href="data:,">{tags}', encoding="utf-8")
    _Server.missing.clear()
    try:
        with (
            ThreadingHTTPServer(("127.0.0.1", 0), partial(_Server, directory=str(site))) as server,
            tempfile.TemporaryDirectory() as profile,
        ):
            threading.Thread(target=server.serve_forever, daemon=True).start()
            words = [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
                f"--user-data-dir={profile}", "--virtual-time-budget=20000", f"--window-size={width},900",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                f"http://127.0.0.1:{server.server_address[1]}/{frames.name}",
            ]  # fmt: skip
            done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
            server.shutdown()
    finally:
        frames.unlink()
    if done.stdout.count("<iframe") != len(pages):
        return [f"the browser did not open the pages: {done.stderr[-2000:]}"]
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line] + _Server.missing


def main() -> int:
    """Check the site; 0 if nothing is wrong."""
    site, browser = Path(sys.argv[1]), next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is installed")
        return 1
    wrong = [f"{width} px: {line}" for width in WIDTHS for line in complaints(site, browser, width)]
    print(*wrong or ["nothing to complain of"], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
