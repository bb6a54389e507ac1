# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V3 model of Hugging Face decodes absorbed: rows of latent numbers are all it reads.

python examples/huggingface/latent.py    logits of a prompt and of new tokens against the model's
own attention; ends with 1 if they differ. The model is small, with random weights.

transformers caches a latent and a rotary part a token, and expands both to keys and values of every
head at each step. Here each layer keeps them as one row and attends to the rows as they are, where
fulmen.mla_form finds that cheaper; a prompt is read in the expanded form, by the model's own code.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

try:
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
except ImportError:
    print("this example needs PyTorch and transformers: pip install torch transformers")
    sys.exit(0)

import fulmen

MAX_ROWS = 64
CONFIG = DeepseekV3Config(
    vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
    num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8, n_routed_experts=4,
    num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=2, kv_lora_rank=64,
    q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
    max_position_embeddings=MAX_ROWS, pad_token_id=0,
)  # fmt: skip


def projected(layer: Any, hidden: Any, position_embeddings: Any) -> tuple[Any, Any]:
    """q (batch, head, row, nope + rope) and the row (batch, row, latent + rope) of each token."""
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
    q = q.view(*hidden.shape[:2], layer.num_heads, -1).transpose(1, 2)
    nope, q_rot = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
    made = layer.kv_a_proj_with_mqa(hidden)
    latent, k_rot = made.split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
    turn = deepseek.apply_rotary_pos_emb_interleave
    q_rot, k_rot = turn(q_rot, k_rot[:, None], *position_embeddings)
    rows = torch.cat([layer.kv_a_layernorm(latent), k_rot[:, 0]], dim=-1)
    return torch.cat([nope, q_rot], dim=-1), rows


def attend(layer: Any, q: Any, kv_rows: int) -> Any:
    """(batch, row, head, v_head_dim): new rows q, the last of those in layer.rows."""
    nope, latent = layer.qk_nope_head_dim, layer.kv_lora_rank
    W = layer.kv_b_proj.weight.view(layer.num_heads, -1, latent)
    W_k, W_v = W[:, :nope], W[:, nope:]
    cache = layer.rows[:, :, :kv_rows]  # (batch, 1, row, latent + rope)
    options = {"scale": layer.scaling, "causal": True}
    sizes = {"latent": latent, "rope": layer.qk_rope_head_dim, "nope": nope}
    form = fulmen.mla_form(q.shape[2], kv_rows, layer.num_heads, **sizes, dim_v=layer.v_head_dim)
    layer.forms.append(form.form)
    if form.form == "absorbed":
        absorbed = torch.cat([q[..., :nope] @ W_k, q[..., nope:]], dim=-1)
        o = fulmen.attention_mla(absorbed, cache, dim_v=latent, **options)
        return (o @ W_v.transpose(1, 2)).transpose(1, 2)
    c, r = cache.split([latent, layer.qk_rope_head_dim], dim=-1)
    k = torch.cat([c @ W_k.transpose(1, 2), r.expand(-1, layer.num_heads, -1, -1)], dim=-1)
    return fulmen.attention(q, k, c @ W_v.transpose(1, 2), **options).transpose(1, 2)


def forward(layer: Any, hidden_states: Any, position_embeddings: Any, **_: Any) -> tuple[Any, None]:
    """What takes the place of DeepseekV3Attention.forward."""
    q, rows = projected(layer, hidden_states, position_embeddings)
    first, layer.length = layer.length, layer.length + rows.shape[1]
    layer.rows[:, 0, first : layer.length] = rows
    o = attend(layer, q, layer.length)
    return layer.o_proj(o.reshape(*hidden_states.shape[:2], -1)), None


def use_latent_rows(model: Any, batch: int) -> None:
    """Every layer attends through fulmen from now on, from an empty cache."""
    for block in model.model.layers:
        layer = block.self_attn
        dim = layer.kv_lora_rank + layer.qk_rope_head_dim
        weight = layer.kv_b_proj.weight
        layer.rows = weight.new_zeros(batch, 1, MAX_ROWS, dim)
        layer.length, layer.forms = 0, []
        layer.forward = MethodType(forward, layer)


def main() -> int:
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(CONFIG).eval()
    tokens = torch.randint(3, 512, (2, 40))
    with torch.no_grad():
        wanted = model(input_ids=tokens, use_cache=False).logits
        use_latent_rows(model, len(tokens))
        steps = [(0, 32), *((i, i + 1) for i in range(32, 40))]  # a prompt, then token by token
        found = []
        for begin, end in steps:
            positions = torch.arange(begin, end)[None]
            out = model(input_ids=tokens[:, begin:end], position_ids=positions, use_cache=False)
            found.append(out.logits)
    difference = (torch.cat(found, dim=1) - wanted).abs().max()
    forms = model.model.layers[0].self_attn.forms
    print(f"prompt {forms[0]}, new tokens {forms[-1]}; logits differ by at most {difference:.1e}")
    return int(difference > 1e-4 or set(forms[1:]) != {"absorbed"})


if __name__ == "__main__":
    sys.exit(main())
