# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Models whose sequence is shared among ranks give the loss and the gradients of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from long_run import IS_FULL

transformers = pytest.importorskip("transformers")

import fulmen  # noqa: E402
from fulmen import distributed as fd  # noqa: E402
from fulmen.compat import hf_context  # noqa: E402

CONFIG = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "sliding_window": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


def model_of(implementation: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.MistralConfig(**CONFIG, attn_implementation=implementation)
    return transformers.MistralForCausalLM(config)


def loss_of(logits: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )


@pytest.mark.parametrize("schedule", ["gather", "ring"] if IS_FULL else ["ring"])
def test_a_model_on_ranks_trains_as_on_one(schedule: str) -> None:
    ids = torch.randint(2, 97, (2, 61))
    labels = ids.roll(-1, 1)
    one = model_of("eager")
    loss = loss_of(one(ids, use_cache=False).logits, labels)
    loss.backward()
    names = [f"fulmen_cp_{schedule}_{rank}" for rank in range(2)]
    models = []  # transformers builds models on one thread at a time
    for name in names:
        hf_context.register(None, name)
        models.append(model_of(name))

    def rank(transport: Any) -> Any:
        cp = fd.context_parallel(transport, schedule=schedule)
        hf_context.register(cp, names[cp.rank])
        model = models[cp.rank]
        mine = cp.shard(ids)
        place = cp.positions()[None].expand(2, -1)
        own = loss_of(model(mine, position_ids=place, use_cache=False).logits, cp.shard(labels))
        own.backward()
        return own.detach(), [x.grad for x in model.parameters()]

    results = fd.in_process(2, rank, timeout=60)
    torch.testing.assert_close(sum(x for x, _ in results), loss.detach())
    for x, *parts in zip(one.parameters(), *(found for _, found in results)):
        torch.testing.assert_close(sum(parts), x.grad, rtol=1e-3, atol=1e-4)


def test_what_a_shared_model_refuses() -> None:
    def rank(transport: Any) -> None:
        cp = fd.context_parallel(transport)
        hf_context.register(cp)
        model = model_of("fulmen_cp")
        ids = cp.shard(torch.randint(2, 97, (1, 30)))
        padded = torch.ones_like(ids)
        padded[0, 0] = 0
        with pytest.raises(fulmen.UnsupportedError, match="hides tokens of the rank"):
            model(ids, attention_mask=padded, use_cache=False)
        model.train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.raises(fulmen.UnsupportedError, match="dropout_p"):
            model(ids, use_cache=False)

    fd.in_process(1, rank)
