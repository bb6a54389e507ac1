# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.compat.hf in transformers' continuous batching: packed prompts, decoding from pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.generation.continuous_batching")

from test_hf import decoder  # noqa: E402

import fulmen  # noqa: E402
from fulmen.compat import hf  # noqa: E402

NAME = "fulmen_flash_3"  # transformers looks for "flash" and a version in it
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
hf.register(NAME)


class Layer:
    is_causal = True


def pools() -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in one memory, pages of K and of V in turn, as transformers has them."""
    memory = torch.full((15, PAGE, KV_HEADS, DIM), torch.nan, device=DEVICE)
    return memory[:14], memory[1:]


@pytest.mark.parametrize("window", [None, 3])
def test_new_rows_are_written_into_their_pages_and_seen(window: int | None) -> None:
    k_pool, v_pool = pools()
    table = torch.tensor([[2, 6, -1], [0, 12, 4], [-1, -1, -1]], dtype=torch.int32, device=DEVICE)
    lengths = [5, 9, 0]  # the last only fills a graph
    present = torch.randn(2, 2, 9, KV_HEADS, DIM, device=DEVICE)
    for b in range(2):
        for j in range(lengths[b] - 1):
            k_pool[table[b, j // PAGE], j % PAGE], v_pool[table[b, j // PAGE], j % PAGE] = (
                present[0, b, j], present[1, b, j]
            )  # fmt: skip
    q = torch.randn(1, HEADS, 3, DIM, device=DEVICE)
    k, v = torch.randn(2, 1, KV_HEADS, 3, DIM, device=DEVICE)
    cu = torch.tensor([0, 5, 14, 14], dtype=torch.int32, device=DEVICE)
    before = k_pool.clone()
    o, _ = hf.attention_hook(
        Layer(), q, k, v, None, sliding_window=window, block_table=table, k_cache=k_pool,
        v_cache=v_pool, cu_seq_lens_k=cu, cu_seq_lens_q=torch.arange(4), max_length_q=1,
        max_length_k=14,
    )  # fmt: skip
    assert o.shape == (1, 3, HEADS, DIM)
    for b in range(2):
        last = lengths[b] - 1
        keys, values = (
            torch.cat([present[i, b, :last], new[0, :, b][None]]).transpose(0, 1)[None]
            for i, new in enumerate((k, v))
        )
        options: dict[str, Any] = {} if window is None else {"window": (window - 1, 0)}
        wanted = fulmen.attention(q[:, :, b : b + 1], keys, values, **options)
        torch.testing.assert_close(o[:, b], wanted[:, :, 0])
    assert (o[0, 2] == 0).all()
    changed = ~torch.isclose(k_pool, before, equal_nan=True).all(-1).all(-1)
    assert changed.nonzero().tolist() == [[4, 0], [5, 0], [6, 0], [7, 0]]


def test_what_it_lacks_is_said() -> None:
    k_pool, v_pool = pools()
    x = torch.zeros(1, HEADS, 1, DIM, device=DEVICE)
    k = torch.zeros(1, KV_HEADS, 1, DIM, device=DEVICE)
    table = torch.zeros(1, 3, dtype=torch.int32, device=DEVICE)
    for given in ({"block_table": table, "k_cache": k_pool}, {"k_cache": k_pool}):
        with pytest.raises(fulmen.ArgumentError, match="a paged cache is block_table"):
            hf.attention_hook(Layer(), x, k, k, None, **given)
    with pytest.raises(fulmen.UnsupportedError, match="beside block_table"):
        hf.attention_hook(
            Layer(), x, k, k, torch.ones(1, 1, dtype=torch.bool), block_table=table,
            k_cache=k_pool, v_cache=v_pool, cu_seq_lens_k=torch.tensor([0, 1]),
        )  # fmt: skip


@pytest.mark.parametrize("pages_of_request", [0, 8])
def test_continuous_batching_gives_the_tokens_of_eager(
    pages_of_request: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0 pages a request transformers gathers keys itself; else it hands over its pages."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching import initialization
    from transformers.integrations import flash_paged

    decoded = []
    name = "_paged_decode_forward"  # of older versions, which write the new rows themselves
    where, name = (flash_paged, name) if hasattr(flash_paged, name) else (hf, "_decoded")
    original = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *a, **w: decoded.append(0) or original(*a, **w))
    if DEVICE == "cpu":  # there transformers asks for a GPU
        monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    torch.manual_seed(0)
    model = decoder("Llama").to(DEVICE)
    prompts = [list(range(3, 22)), [5, 6, 7], [9] * 33]
    generation = GenerationConfig(
        max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=DEVICE)
        wanted.append(model.generate(ids, generation_config=generation)[0, len(prompt) :].tolist())
    model.set_attn_implementation(NAME)
    page = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    found = model.generate_batch(
        inputs=prompts, generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=32, max_batch_tokens=64, use_cuda_graph=False,
            max_blocks_per_request=pages_of_request, **{page: 16},
        ),
    )  # fmt: skip
    assert [list(x.generated_tokens) for x in found.values()] == wanted
    assert bool(decoded) == bool(pages_of_request)
