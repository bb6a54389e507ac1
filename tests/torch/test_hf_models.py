# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""More families of transformers, with random weights: fulmen against eager, forward and backward.

FULMEN_TEST_FULL=1: padding on every side.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from long_run import IS_FULL

transformers = pytest.importorskip("transformers")

from test_hf import DECODER, ENCODER, agree, decoder, padded  # noqa: E402

SHORT = {"head_dim": 16, "sliding_window": 6}
# Two a token: the weight of a single one is divided by itself, and its gate learns nothing.
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
# Decoders: configuration, model, what differs from DECODER.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "Phi-3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 6}),
    "Gemma 3": ("Gemma3TextConfig", "Gemma3ForCausalLM",
                {**SHORT, "query_pre_attn_scalar": 16, "layer_types":
                 ["sliding_attention", "full_attention"]}),
    "Llama 4": ("Llama4TextConfig", "Llama4ForCausalLM",
                {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96,
                 "attention_chunk_size": 6, "num_experts_per_tok": 1}),
    "DeepSeek-V3": ("DeepseekV3Config", "DeepseekV3ForCausalLM",
                    {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
                     "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
                     "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
                     "num_key_value_heads": 4, "first_k_dense_replace": 1}),
    "OPT": ("OPTConfig", "OPTForCausalLM",
            {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "BERT decoder": ("BertConfig", "BertLMHeadModel", {"is_decoder": True}),
}  # fmt: skip


def family(name: str, **changed: Any) -> Any:
    config, model, more = FAMILIES[name]
    made = getattr(transformers, config)(**{**DECODER, **more, **changed})
    return getattr(transformers, model)(made).eval()


def tokens_of(model: Any, **how: Any) -> list[torch.Tensor]:
    """What eager and fulmen generate from the same padded prompt."""
    prompt, found = padded("left"), []
    for implementation in ("eager", "fulmen"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(**prompt, max_new_tokens=6, do_sample=False, **how))
    return found


@pytest.mark.parametrize("side", ["no", "left", "right"] if IS_FULL else ["left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, side: str) -> None:
    inputs = padded(side)
    agree(family(name), inputs, inputs["attention_mask"])


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_of_families(name: str) -> None:
    assert torch.equal(*tokens_of(family(name)))


def test_beam_search() -> None:
    assert torch.equal(*tokens_of(decoder("Llama"), num_beams=3))


def test_a_decoder_told_to_see_both_ways() -> None:
    inputs = padded("right")
    agree(decoder("Llama", is_causal=False), inputs, inputs["attention_mask"])


def test_gemma_3_sees_both_ways() -> None:
    inputs = padded("right")
    model = family("Gemma 3", use_bidirectional_attention=True)
    agree(model, inputs, inputs["attention_mask"])


def test_modernbert() -> None:
    config = transformers.ModernBertConfig(
        **ENCODER, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        local_attention=6, global_attn_every_n_layers=2,
    )  # fmt: skip
    inputs = padded("right")
    model = transformers.ModernBertModel(config).eval()
    agree(model, inputs, inputs["attention_mask"], "last_hidden_state")


def test_bart() -> None:
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    agree(model, {**padded("right"), "decoder_input_ids": torch.randint(3, 97, (2, 7))})
