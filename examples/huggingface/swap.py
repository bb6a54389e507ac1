# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model on fulmen: register, and name it. Two lines change.

python examples/huggingface/swap.py    logits and greedy tokens against eager attention; ends with
1 if they differ. The model is a small Llama with random weights; from_pretrained takes the same
attn_implementation.
"""

from __future__ import annotations

import sys

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    print("this example needs PyTorch and transformers: pip install torch transformers")
    sys.exit(0)

# --8<-- [start:swap]
import fulmen.compat.hf

fulmen.compat.hf.register()  # now transformers knows attn_implementation="fulmen"
# --8<-- [end:swap]

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
    bos_token_id=1, eos_token_id=None,
)  # fmt: skip


def main() -> int:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    tokens = torch.randint(3, 512, (2, 20))
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0  # a shorter prompt, padded on the left
    logits, greedy = {}, {}
    for implementation in ("eager", "fulmen"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = model(input_ids=tokens, attention_mask=mask).logits
        greedy[implementation] = model.generate(
            tokens, attention_mask=mask, max_new_tokens=16, do_sample=False
        )
    visible = mask.bool()
    difference = (logits["eager"] - logits["fulmen"])[visible].abs().max()
    same = torch.equal(greedy["eager"], greedy["fulmen"])
    print(f"logits differ by at most {difference:.1e}; greedy tokens equal: {same}")
    return int(difference > 1e-5 or not same)


if __name__ == "__main__":
    sys.exit(main())
