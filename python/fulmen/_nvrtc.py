# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Where pip has put NVRTC, the compiler of GPU kernels: told to the library, which opens one.

The packages nvidia-cuda-nvrtc and nvidia-cuda-nvrtc-cu12 hold it, and PyTorch brings it along.
Nothing is imported and nothing opened to find them: folders on the path are listed, once, when a
call first has to do with a GPU.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

# Below a folder of sys.path; CUDA 13's packages share a folder, those before have their own.
FOLDERS = (
    *(f"nvidia/{name}/lib" for name in ("cu14", "cu13", "cuda_nvrtc")),
    *(f"nvidia/{name}/bin" for name in ("cu13", "cuda_nvrtc")),
    "torch/lib",
)

_announced = False
_lock = threading.Lock()


def candidates() -> list[str]:
    """Files that look like NVRTC, in the order of sys.path, newest first in each folder."""
    found: list[str] = []
    for entry in dict.fromkeys(sys.path):
        for folder in FOLDERS:
            found += sorted(_compilers(os.path.join(entry or os.curdir, folder)), reverse=True)
    return found


def _compilers(folder: str) -> Iterator[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        is_compiler = name.startswith(("libnvrtc.so", "libnvrtc-", "nvrtc64_"))
        if is_compiler and "builtins" not in name and ".alt." not in name:
            yield os.path.join(folder, name)


def announce() -> None:
    """Tells the library the candidates, once for the process."""
    global _announced  # noqa: PLW0603  told once
    if _announced:
        return
    with _lock:
        if not _announced:
            from ._library import library, text_argument

            library().set_nvrtc_candidates(text_argument("\0".join(candidates())))
            _announced = True
