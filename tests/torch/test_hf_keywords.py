# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What the attention hook of fulmen.compat.hf receives: each keyword is read, has no effect, or is
refused; packed documents; masks of a model's own."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from long_run import full

transformers = pytest.importorskip("transformers")

from test_hf import DECODER, decoder  # noqa: E402

import fulmen  # noqa: E402
from fulmen.compat import hf, hf_masks  # noqa: E402

CU = [0, 7, 19, 24]


def alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of each document by itself, one after the other, by eager attention."""
    model.set_attn_implementation("eager")
    parts = [model(input_ids=ids[:, a:b]).logits for a, b in zip(CU, CU[1:])]
    model.set_attn_implementation("fulmen")
    return torch.cat(parts, 1)


def offsets(dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    cu = torch.tensor(CU, dtype=dtype)
    longest = {"max_length_q": 12, "max_length_k": 12}
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu.clone(), **longest}


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_packed_documents_are_each_alone(name: str) -> None:
    """Positions as a collator gives them, restarting, and the ways to say where."""
    model, ids = decoder(name), torch.randint(3, 97, (1, 24))
    positions = torch.cat([torch.arange(b - a) for a, b in zip(CU, CU[1:])])[None]
    expected = alone(model, ids)
    seq_idx = torch.repeat_interleave(torch.arange(3), torch.tensor([7, 12, 5]))[None]
    given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    for said in (offsets(), offsets(torch.int64), {"seq_idx": seq_idx},
                 {**offsets(), "seq_idx": seq_idx}):  # fmt: skip
        torch.testing.assert_close(model(**given, **said).logits, expected, atol=1e-5, rtol=1e-5)
    found = model(**{**given, "use_cache": True}, **offsets()).logits  # no documents in the mask
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_offsets_hold_where_positions_run_on() -> None:
    """Rotary positions are relative, so that each document is what it is alone."""
    model, ids = decoder("Llama"), torch.randint(3, 97, (1, 24))
    positions, expected = torch.arange(24)[None], alone(model, ids)
    found = model(input_ids=ids, position_ids=positions, **offsets()).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@full
def test_offsets_compile() -> None:
    """Where the mask hook makes a dense mask of positions that restart, and where it makes none."""
    torch._dynamo.reset()
    model, ids = decoder("Llama"), torch.randint(3, 97, (1, 24))
    expected = alone(model, ids)
    compiled = torch.compile(lambda **given: model(**given).logits, backend="aot_eager")
    restarting = torch.cat([torch.arange(b - a) for a, b in zip(CU, CU[1:])])[None]
    for positions in (torch.arange(24)[None], restarting):
        found = compiled(input_ids=ids, position_ids=positions, use_cache=False, **offsets())
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_offsets_with_gradients_and_a_batch_of_rows() -> None:
    """Two batch entries, one document across neither: offsets count the rows of both."""
    layer = torch.nn.Module()
    q, k, v = (torch.randn(2, n, 12, 16, requires_grad=True) for n in (4, 2, 2))
    cu = torch.tensor([0, 5, 12, 20, 24])
    o, _ = hf.attention_hook(layer, q, k, v, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    ids = torch.tensor([[0] * 5 + [1] * 7, [2] * 8 + [3] * 4])
    expected = fulmen.attention(q, k, v, causal=True, mask=fulmen.masks.documents(ids))
    torch.testing.assert_close(o, expected.transpose(1, 2))
    do = torch.randn_like(o)
    found = torch.autograd.grad(o, (q, k, v), do)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), do.transpose(1, 2)))


def test_offsets_beside_masks() -> None:
    """A mask hides more, whatever its form: what both show is seen."""
    layer = torch.nn.Module()
    q, k, v = (torch.randn(2, 4, 12, 16) for _ in range(3))
    cu = torch.tensor([0, 5, 12, 20, 24])
    ids = torch.tensor([[0] * 5 + [1] * 7, [2] * 8 + [3] * 4])
    packed = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    keys = torch.rand(2, 12) > 0.3
    halves = torch.arange(12).expand(2, 12) // 3
    dense = torch.rand(2, 1, 12, 12) > 0.3

    def expected(mask: Any, **options: Any) -> torch.Tensor:
        options = {"mask": (fulmen.masks.documents(ids), mask), **options}
        return fulmen.attention(q, k, v, **options).transpose(1, 2)

    same = (ids[:, None, :, None] == ids[:, None, None, :]) & (
        halves[:, None, :, None] == halves[:, None, None, :]
    )
    for mask, wanted in (
        (keys, expected(keys[:, None, None, :], causal=True)),
        (keys.long(), expected(keys[:, None, None, :], causal=True)),
        (hf.PackedDocuments(halves), expected(same, causal=True)),
        (dense, expected(dense)),
        (torch.where(dense, 0.0, -torch.inf), expected(dense)),
    ):
        found, _ = hf.attention_hook(layer, q, k, v, mask, **packed)
        torch.testing.assert_close(found, wanted)
    with pytest.raises(fulmen.UnsupportedError, match="position_bias is given with cu_seq_lens"):
        hf.attention_hook(layer, q, k, v, None, position_bias=torch.zeros(4, 12, 12), **packed)
    with pytest.raises(fulmen.ArgumentError, match="without cu_seq_lens_k"):
        hf.attention_hook(layer, q, k, v, None, cu_seq_lens_q=cu)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("rows", [12, 60])
def test_a_key_padding_mask_of_integers_in_cross_attention(rows: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, n, 16) for n in (rows, 20, 20))
    keys = torch.arange(20) < torch.tensor([[20], [13]])
    found, _ = hf.attention_hook(torch.nn.Module(), q, k, v, keys.to(dtype), is_causal=False)
    expected = fulmen.attention(q, k, v, mask=keys[:, None, None, :])
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_masks_that_say_too_little_are_refused() -> None:
    x = torch.randn(2, 4, 12, 16)
    for mask, match in (
        (torch.ones(2, 12), "float32, which may be added"),
        (torch.ones(2, 1, 12), "has 3 axes"),
        (hf.PackedDocuments(torch.ones(2, 11, dtype=torch.long)), r"integers \(batch, 12\)"),
    ):
        with pytest.raises(fulmen.ArgumentError, match=match):
            hf.attention_hook(torch.nn.Module(), x, x, x, mask)


def test_a_model_that_wants_a_mask_of_four_axes_gets_one() -> None:
    given = {"batch_size": 1, "q_length": 5, "kv_length": 5}
    assert hf.mask_hook(**given) is None
    assert hf.mask_hook(**given, allow_is_causal_skip=False).shape == (1, 1, 5, 5)


def test_unknown_keywords_are_refused_by_name() -> None:
    x = torch.randn(1, 2, 5, 8)
    for name in ("flavour", "indices", "sinks"):
        with pytest.raises(fulmen.UnsupportedError, match=f"^{name} is given"):
            hf.attention_hook(torch.nn.Module(), x, x, x, None, **{name: x})
    known = dict.fromkeys(hf.WITHOUT_EFFECT, x)
    plain, _ = hf.attention_hook(torch.nn.Module(), x, x, x, None)
    assert torch.equal(hf.attention_hook(torch.nn.Module(), x, x, x, None, **known)[0], plain)
    model = decoder("Llama")
    model.set_attn_implementation("fulmen")
    with pytest.raises(fulmen.UnsupportedError, match=r"^flavour is given"):
        model(input_ids=torch.tensor([[1, 2]]), flavour="sweet")


CALL = re.compile(r"attention_interface\(\n(?P<arguments>( +)self.*\n(\2.*\n)+)")


def keywords_of_models() -> dict[str, str]:
    """What the models of transformers hand to an attention function by name, and who does."""
    found: dict[str, str] = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        for call in CALL.finditer(path.read_text()):
            own = re.compile(f"^{call[2]}(\\w+)=", re.MULTILINE)
            for name in own.findall(call["arguments"]):
                found.setdefault(name, path.parent.name)
    return found


def test_every_keyword_of_every_model_is_read_or_on_a_list() -> None:
    """Of the installed transformers; a new one must be looked at."""
    read = set(inspect.signature(hf.attention_hook).parameters)
    known = read | set(hf.WITHOUT_EFFECT) | set(hf._REFUSED) | set(hf.SAME_WORDS)
    handed = keywords_of_models()
    assert {"cu_seq_lens_q", "indices", "position_bias", "s_aux", "softcap"} <= set(handed)
    unknown = {name: who for name, who in handed.items() if name not in known}
    assert not unknown


def test_models_with_code_of_their_own_say_so_once() -> None:
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97}
    config = transformers.BloomConfig(**sizes)
    hf._told.clear()
    with pytest.warns(UserWarning, match=r"BloomModel has attention code of its own.*'eager'"):
        model = transformers.AutoModel.from_config(config, attn_implementation="fulmen")
    assert model.config._attn_implementation == "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transformers.AutoModel.from_config(config, attn_implementation="fulmen")
        llama = transformers.LlamaConfig(**DECODER)
        made = transformers.AutoModelForCausalLM.from_config(llama, attn_implementation="fulmen")
    assert made.config._attn_implementation == "fulmen"
    model.config._attn_implementation_internal = "fulmen"  # past transformers' own check
    with pytest.raises(fulmen.UnsupportedError, match="BloomConfig says"):
        model(input_ids=torch.tensor([[1, 2]]))
    assert hf_masks._keeps_own_code(type(llama)) is None
