# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The calls on PyTorch tensors: differentiable, traceable by torch.compile and torch.export.

Imported by fulmen.array_types when a call is handed a tensor, never by `import fulmen`. Nothing in
fulmen refers to what is here: api.py enters its calls in array_types.TORCH_CALLS. A call goes one
of two ways:

    eager, no mode or transform   straight to the library (fast_path.py), or through one
                                  autograd.Function (autograd.py)
    all else                      the operators fulmen::attention, fulmen::attention_backward,
                                  fulmen::attention_out and fulmen::merge (ops.py, autograd.py); the
                                  first two end in kernels of the library, and so do compiled
                                  programs

Second derivatives and forward mode are composed from a dense formula over a few rows at a time
(reference.py, derivatives.py), so that their memory stays linear in the sequence.
"""

from importlib import import_module

CALLS = import_module(f"{__name__}.api").CALLS
