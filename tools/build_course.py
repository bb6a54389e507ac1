# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Builds what the course runs on: the package, if it is not there, and the emulator of GPU kernels.

Called by `make course`. All that CMake prints goes to build/logs/course.log, whose end is shown
when it fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
BUILD = ROOT / "build" / "course"
LOG = ROOT / "build" / "logs" / "course.log"
LINES_OF_LOG_ON_FAILURE = 40


def main() -> int:
    begin = time.monotonic()
    if not (BIN / "fulmen").is_file():
        done = subprocess.run([sys.executable, "tools/install_package.py"], cwd=ROOT, check=False)
        if done.returncode != 0:
            return done.returncode
    print("building the emulator: about a minute", flush=True)
    cmake = str(BIN / "cmake")
    configure = [cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD),
                 "-DCMAKE_BUILD_TYPE=Release", "-DFULMEN_BUILD_EMULATOR=ON"]  # fmt: skip
    build = [cmake, "--build", str(BUILD), "--target", "fulmen_emulated_gpu"]
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("w", encoding="utf-8") as log:
        for command in (configure, build):
            done = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
            )
            if done.returncode != 0:
                end = LOG.read_text(encoding="utf-8").splitlines()[-LINES_OF_LOG_ON_FAILURE:]
                print("\n".join([*end, "", f"the build failed; all that it printed is in {LOG}"]))
                return 1
    print(f"built in {time.monotonic() - begin:.0f} s; now: .venv/bin/fulmen learn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
