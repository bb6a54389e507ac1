# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers whose sequence is shared among ranks.

cp = fulmen.distributed.context_parallel(group)
fulmen.compat.hf_context.register(cp)
model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fulmen_cp")
ids, place = cp.shard(ids), cp.positions(ids.device)[None]
logits = model(ids, position_ids=place, use_cache=False).logits  # of the rows of this rank
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedError
from .flash_shared import SAME_WORDS, WITHOUT_EFFECT, same_words
from .hf_masks import interfaces

__all__ = ["register"]


def register(cp: Any, name: str = "fulmen_cp") -> None:
    """Makes `attn_implementation=name` known to transformers: attention among the ranks of `cp`.

    The rows of the model are those of the rank: ids and labels through `cp.shard`, position_ids
    from `cp.positions`. Causal models and their windows; packed documents, padding, dropout and
    caches are refused by name.

    Args:
        cp: of `fulmen.distributed.context_parallel`. May be called again with another.
        name: how models ask for it.

    Raises:
        fulmen.LibraryNotFound: transformers, 4.56 or later, is not installed.
    """
    attention_interface, mask_interface = interfaces()

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        **words: Any,
    ) -> tuple[torch.Tensor, None]:
        for word, x in words.items():
            if x is not None and word not in WITHOUT_EFFECT and word not in SAME_WORDS:
                raise UnsupportedError(f"{word} is given to {name}, which does not read it")
        if attention_mask is not None:
            raise UnsupportedError(f"a mask of the model's own is given to {name}: {_ALONE}")
        if dropout:
            raise UnsupportedError(
                f"dropout_p={dropout} is given to {name} without the numbers that all ranks draw "
                "by; set attention_dropout to 0, or call cp.attention(dropout_p=..., rng=...)"
            )
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        window = None
        if sliding_window is not None:
            window = (sliding_window - 1, 0 if causal else sliding_window - 1)
        o = cp.attention(
            query, key, value, scale=scaling, causal=causal, window=window, sinks=s_aux,
            **same_words(words),
        )  # fmt: skip
        return o.transpose(1, 2).contiguous(), None

    def mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> None:
        if attention_mask is not None and not bool(attention_mask.all()):
            raise UnsupportedError(f"attention_mask hides tokens of the rank: {_ALONE}")

    attention_interface.register(name, attend)
    mask_interface.register(name, mask)


_ALONE = "a causal model without padding is shared; documents go through cp.attention(mask=...)"
