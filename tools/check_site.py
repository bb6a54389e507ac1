# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Looks at every page of build/site in a browser, as wide as a desk and as a phone.

    check_site.py             all pages
    check_site.py course      those whose path holds a word

A page must not be wider than the window, code and tables that scroll within themselves apart, and
all its pictures must load. Needs Chromium or Chrome; without one it says so and passes.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
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
MOST_SECONDS = 300

# Loads one page after the other into a frame of each width, and writes down what is wrong with it.
PROBE = """<!doctype html><meta charset="utf-8">
<iframe id="frame" style="height: 900px; border: 0"></iframe>
<script>
const pages = PAGES, widths = WIDTHS, found = [];
const frame = document.getElementById("frame");
async function look(page, width) {
  frame.style.width = width + "px";
  const comes = new Promise(done => { frame.onload = () => done(true); frame.src = "/" + page; });
  const waited = new Promise(done => setTimeout(() => done(false), 20000));
  if (!await Promise.race([comes, waited])) { found.push(`${page} does not load`); return; }
  const root = frame.contentDocument;
  const wide = root.documentElement.scrollWidth;
  if (wide > width) found.push(`${page} is ${wide} wide in a window of ${width}`);
  for (const image of root.images) {
    if (image.loading !== "lazy" && !image.naturalWidth) found.push(`${page} lacks ${image.src}`);
  }
}
(async () => {
  for (const width of widths) for (const page of pages) await look(page, width);
  await fetch("/found", { method: "POST", body: JSON.stringify(found) });
})();
</script>
"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, and the probe beside it, which posts what it found."""

    probe = b""
    found: queue.Queue[list[str]] = queue.Queue()

    def do_GET(self) -> None:
        if self.path != "/probe":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.probe)

    def do_POST(self) -> None:
        said = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
        self.found.put(json.loads(said))

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
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        running = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
             f"http://127.0.0.1:{server.server_port}/probe"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return Handler.found.get(timeout=MOST_SECONDS)
        except queue.Empty:
            raise RuntimeError(f"{program} came to no end in {MOST_SECONDS} s") from None
        finally:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            server.shutdown()


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
