# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The calls on PyTorch tensors: differentiable, traceable by torch.compile and torch.export.

Imported by fulmen.functional when it is handed a tensor, never by `import fulmen`. A call goes one
of two ways (calls.py):

    eager, nothing watching   straight to the library, or through one autograd.Function (plain.py,
                              eager.py)
    all else                  the operators fulmen::attention, fulmen::attention_backward,
                              fulmen::attention_out and fulmen::merge (operators.py, autograd.py);
                              the first two end in kernels of the library, and so do compiled
                              programs

Second derivatives and forward mode are composed from a dense formula over a few rows at a time
(rows.py), so that their memory stays linear in the sequence.
"""

from __future__ import annotations

from .calls import attention, merge

__all__ = ["attention", "merge"]
