# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Looks at every page of build/site in a browser, as wide as a desk and as a phone.

    check_site.py             all pages
    check_site.py course      those whose path holds a word

A page must not be wider than the window, code and tables that scroll within themselves apart, and
all its pictures must load. Needs Chromium or Chrome; without one it says so and passes.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from source_tree import ROOT

SITE = ROOT / "build" / "site"
WIDTHS = (1280, 390)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MOST_SECONDS = 600

# Loads one page after the other into a frame of each width, and writes down what is wrong with it.
PROBE = """<!doctype html><meta charset="utf-8">
<iframe id="frame" style="height: 900px; border: 0"></iframe>
<script>
const pages = PAGES, widths = WIDTHS, found = [];
const frame = document.getElementById("frame");
async function look(page, width) {
  frame.style.width = width + "px";
  await new Promise(done => { frame.onload = done; frame.src = "/" + page; });
  const root = frame.contentDocument;
  const wide = root.documentElement.scrollWidth;
  if (wide > width) found.push(`${page} is ${wide} wide in a window of ${width}`);
  for (const image of root.images) {
    if (image.loading !== "lazy" && !image.naturalWidth) found.push(`${page} lacks ${image.src}`);
  }
}
(async () => {
  for (const width of widths) for (const page of pages) await look(page, width);
  const said = document.createElement("pre");
  said.id = "found";
  said.textContent = JSON.stringify(found);
  document.body.append(said);
})();
</script>
"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, and the probe beside it."""

    probe = b""

    def do_GET(self) -> None:
        if self.path != "/probe":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.probe)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


class Server(ThreadingHTTPServer):
    """One that says nothing of a reader who has gone to the next page."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Does nothing."""


def browser() -> str | None:
    """The path of one, if any is installed."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def looked_at(program: str, site: Path, pages: list[str]) -> list[str]:
    """What is wrong with pages below the folder `site`, a sentence each."""
    Handler.probe = (
        PROBE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS)).encode()
    )
    server = Server(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
             "--virtual-time-budget=10000000", "--dump-dom",
             f"http://127.0.0.1:{server.server_port}/probe"],
            capture_output=True, text=True, timeout=MOST_SECONDS, check=False,
        )  # fmt: skip
    server.shutdown()
    said = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    if said is None:
        raise RuntimeError(f"{program} came to no end: {done.stderr[-400:]}")
    found: list[str] = json.loads(html.unescape(said[1]))
    return found


def main() -> int:
    program = browser()
    if program is None:
        print(f"check_site: skipped: none of {', '.join(BROWSERS)} is installed")
        return 0
    words = sys.argv[1:]
    paths = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
    pages = [path for path in paths if not words or any(word in path for word in words)]
    found = looked_at(program, SITE, pages)
    for sentence in found:
        print(sentence)
    print(f"check_site: {len(pages)} pages in {len(WIDTHS)} widths, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
