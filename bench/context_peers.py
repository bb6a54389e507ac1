# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What others do for one causal sequence on several GPUs: sides of bench/context_parallel.py.

torch's `context_parallel` (ring over cuDNN's kernel), and ring-flash-attention's zigzag ring
(`pip install ring-flash-attn`), whose kernels come from a package flash_attn; here from torch's own
FlashAttention-2, or from fulmen, so that the ring alone is compared.

Each side is a context that gives a function of this rank's q, k, v: (batch, row, head, dim) to o,
and the number of key/value heads that it is called with.
"""

from __future__ import annotations

import contextlib
import sys
import types

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from fulmen.compat import flash_interface as flash


@contextlib.contextmanager
def by_torch(device):
    """torch.distributed's context_parallel: all heads have keys of their own."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    carried = torch.zeros(1, 1, 2 * dist.get_world_size(), device=device)  # it must cut something

    def attend(q, k, v):
        x = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(*x, is_causal=True).transpose(1, 2)

    shared = context_parallel(mesh, buffers=[carried], buffer_seq_dims=[2])
    with shared, sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        yield attend


class OfTorch:
    """The two functions of flash_attn that the ring calls, by torch's FlashAttention-2."""

    @staticmethod
    def forward(q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                return_softmax):  # fmt: skip
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=softmax_scale
        )
        return o, lse, None, None

    @staticmethod
    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
                 window_size, alibi_slopes, deterministic):  # fmt: skip
        seed = torch.zeros((), dtype=torch.uint64, device=q.device)
        found = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, softmax_lse, None, None, q.shape[1], k.shape[1], 0.0, causal,
            seed, seed, scale=softmax_scale,
        )  # fmt: skip
        for x, y in zip((dq, dk, dv), found):
            x.copy_(y)


@contextlib.contextmanager
def by_ring(forward, backward):
    """ring-flash-attention's zigzag ring over two functions of flash_attn."""
    package, module = types.ModuleType("flash_attn"), types.ModuleType("flash_attn_interface")
    module._flash_attn_forward, module._flash_attn_backward = forward, backward
    module._flash_attn_varlen_forward = module._flash_attn_varlen_backward = None
    package.flash_attn_interface = module
    adapters = types.ModuleType("adapters")  # for models, and for some transformers alone
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules.update({
        "flash_attn": package, "flash_attn.flash_attn_interface": module,
        "ring_flash_attn.adapters": adapters,
    })  # fmt: skip
    try:
        from ring_flash_attn.zigzag_ring_flash_attn import zigzag_ring_flash_attn_func

        yield lambda q, k, v: zigzag_ring_flash_attn_func(q, k, v, causal=True)
    finally:
        for name in [
            x for x in sys.modules if x.split(".")[0] in ("flash_attn", "ring_flash_attn")
        ]:
            del sys.modules[name]


# name: (context of a device, whether keys are shared by heads)
PEERS = {
    "torch": (by_torch, False),
    "ring-flash-attn over FlashAttention-2": (
        lambda device: by_ring(OfTorch.forward, OfTorch.backward),
        True,
    ),
    "ring-flash-attn over fulmen": (
        lambda device: by_ring(flash._flash_attn_forward, flash._flash_attn_backward),
        True,
    ),
}
