# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.compat on an NVIDIA GPU: SDPA, caches, Hugging Face models, FSDP2. Skipped without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_sdpa import sample_results

import fulmen
from fulmen.compat import flash_attn as fa2
from fulmen.compat import sdpa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
THEIRS = torch.nn.functional.scaled_dot_product_attention


def test_a_cache_on_the_gpu_is_appended_to_in_place() -> None:
    k_cache, v_cache = (torch.randn(3, 300, 2, 64, device="cuda").half() for _ in range(2))
    q, k, v = (torch.randn(3, 2, h, 64, device="cuda").half() for h in (4, 2, 2))
    lengths = torch.tensor([0, 298, 77], dtype=torch.int32, device="cuda")
    o = fa2.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    for b, start in enumerate(lengths.tolist()):
        assert torch.equal(k_cache[b, start : start + 2], k[b])
        alone = fa2.flash_attn_func(
            q[b : b + 1], k_cache[b : b + 1, : start + 2], v_cache[b : b + 1, : start + 2],
            causal=True,
        )  # fmt: skip
        torch.testing.assert_close(o[b : b + 1], alone, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_samples_of_torch(dtype: Any) -> None:
    methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    name = "nn.functional.scaled_dot_product_attention"
    operator = next(op for op in methods.op_db if op.name == name)
    num_compared = 0
    for sample in operator.sample_inputs("cuda", dtype, requires_grad=True):
        if sample.kwargs.get("dropout_p", 0.0) > 0:
            continue
        with sdpa.replaced(strict=True):
            found = sample_results(operator, sample, dtype)
        exact = sample_results(operator, sample, torch.float64)
        for ours, truth in zip(found[0] + found[1], exact[0] + exact[1]):
            if ours is None or truth is None:
                assert ours is truth or (truth if ours is None else ours).eq(0).all()
                continue
            bound = 1e-4 if dtype is torch.float32 else 3e-2
            scale = truth.detach().abs().max() if truth.numel() else 1.0
            torch.testing.assert_close(ours.double(), truth, atol=float(bound * scale), rtol=bound)
            num_compared += 1
    assert num_compared > 40


def test_a_whole_model_by_sdpa() -> None:
    layer = torch.nn.TransformerEncoderLayer(
        64, 4, 128, dropout=0.0, batch_first=True, device="cuda", dtype=torch.float16
    )
    x = torch.randn(2, 33, 64, device="cuda", dtype=torch.float16)
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True)
    with sdpa.replaced(strict=True):
        for found in (layer(x), compiled(x)):
            torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)


def test_fsdp2_in_mixed_precision() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(64, 192)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(x).unflatten(-1, (3, 1, 64)).unbind(-3)
            return x + fulmen.attention(q, k, v, layout="bshd", causal=True).flatten(-2)

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(Block(), Block()).cuda()
        x = torch.randn(2, 40, 64, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(x).float().square().mean().backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        for block in model:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model)
        model(x).float().square().mean().backward()
        for parameter, gradient in zip(model.parameters(), expected):
            error = (parameter.grad.full_tensor() - gradient).abs().max()
            assert error < 0.05 * gradient.abs().max()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("side", ["no", "left", "right"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Mistral", "GptOss"])
def test_decoders(name: str, side: str) -> None:
    models = pytest.importorskip("test_hf")
    given = {key: x.cuda() for key, x in models.padded(side).items()}
    visible = given["attention_mask"]
    if side == "no":
        del given["attention_mask"]
    models.agree(models.decoder(name).cuda(), given, visible)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "GptOss"])
def test_greedy_tokens_are_equal(name: str, cache: Any) -> None:
    models = pytest.importorskip("test_hf")
    model, tokens = models.decoder(name).cuda(), []
    given = {key: x.cuda() for key, x in models.padded("left").items()}
    for implementation in ("eager", "fulmen"):
        model.set_attn_implementation(implementation)
        tokens.append(
            model.generate(
                **given, max_new_tokens=9, do_sample=False, cache_implementation=cache,
                disable_compile=True,
            )
        )  # fmt: skip
    assert torch.equal(*tokens)


def test_a_model_compiled_whole() -> None:
    models = pytest.importorskip("test_hf")
    model = models.decoder("Llama").cuda()
    model.set_attn_implementation("fulmen")
    given = {key: x.cuda() for key, x in models.padded("left").items()}
    compiled = torch.compile(model, fullgraph=True)
    found, expected = compiled(**given).logits, model(**given).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
