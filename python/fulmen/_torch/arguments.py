# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What callers pass beside tensors: lists, numbers and NumPy arrays as tensors; streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import DTypeError, UnsupportedError, kind_of
from ..page_tables import INTEGERS


def tensor_of(name: str, x: Any, device: Any) -> Any:
    """An array as a tensor: lists and NumPy arrays go to `device`."""
    if x is None or isinstance(x, Tensor):
        return x
    try:
        made = torch.as_tensor(x, device=device)
    except Exception:
        raise DTypeError(f"{name} is {kind_of(x)}; a tensor is expected") from None
    return made.long() if name in INTEGERS and made.numel() == 0 else made


def scale_tensor(name: str, x: Any, device: Any) -> Any:
    """Scales as a tensor of an axis at least: from a number on `device`, or an array."""
    if isinstance(x, (int, float)):
        return torch.full((1,), x, dtype=torch.float32, device=device)
    made = tensor_of(name, x, device)
    return made.reshape(1) if made is not None and made.dim() == 0 else made


def refuse_stream(stream: Any) -> None:
    """Refuses stream=, which tensors have of torch."""
    if stream is not None:
        raise UnsupportedError(
            "stream is given with PyTorch tensors; their work goes to torch's current stream: use "
            "torch.cuda.stream(...) and leave stream=None"
        )
