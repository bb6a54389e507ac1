# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The calls of other libraries, on fulmen: for a model that changes one line.

    fulmen.compat.sdpa         torch.nn.functional.scaled_dot_product_attention
    fulmen.compat.flash_impl   the flash backend inside that function, through torch's registry
    fulmen.compat.flash_attn   flash_attn_func and its family, as FlashAttention 2 has them; ..._3
                               and ..._4 those of its successors, flash_interface what lies below
    fulmen.compat.flash_mla    flash_mla_with_kvcache, as FlashMLA has it
    fulmen.compat.flex         flex_attention with its score_mod and BlockMask, as torch has it
    fulmen.compat.hf           an attention implementation for Hugging Face transformers

Each keeps names, arguments and meaning of the original and says what it refuses; docs: Migration
has the table of what differs. Nothing here is imported by `import fulmen`.
"""
