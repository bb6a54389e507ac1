# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""fulmen.jax.attention on sharded arrays: eight CPU devices, each computing its part.

Values and gradients are those of one device, and the compiled program gathers nothing. Inside of
jax.shard_map too, with the checks that it makes by default. Skipped without JAX.
"""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import fulmen  # noqa: E402
import fulmen.jax  # noqa: E402

Arrays = dict[str, Any]
Spec = tuple[Any, ...]


def mesh() -> Mesh:
    devices = jax.devices("cpu")
    assert len(devices) >= 8, "tests/jax/conftest.py asks for eight"
    return Mesh(np.array(devices[:8]).reshape(2, 4), ("x", "y"))


def drawn(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    rng = np.random.default_rng(0)
    cpu = jax.devices("cpu")[0]
    return {
        name: jax.device_put(rng.standard_normal(shape).astype(np.float32), cpu)
        for name, shape in shapes.items()
    }


def loss(arrays: Arrays, options: dict[str, Any]) -> Any:
    q, k, v = (arrays[name] for name in "qkv")
    more = {name: x for name, x in arrays.items() if name not in ("q", "k", "v")}
    o, lse = fulmen.jax.attention(q, k, v, return_lse=True, **more, **options)
    return jnp.sin(o).sum() + jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0).sum()


def shapes(heads: int, kv_heads: int, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    kv = (4, kv_heads, 9, 16)
    return {"q": (4, heads, 6, 16), "k": kv, "v": kv, **more}


BATCH, HEADS, BOTH = ("x",), (None, "y"), ("x", "y")
WITH_BIAS = {"bias": (1, 8, 6, 9), "sinks": (8,)}
# Shapes, where the arrays are sharded, options, and how many sums over devices the gradient takes.
CASES: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Spec], dict[str, Any], bool]] = {
    "batch": (shapes(8, 4), dict.fromkeys("qkv", BATCH), {"causal": True}, False),
    "batch over both axes": (
        {name: (8, *shape[1:]) for name, shape in shapes(8, 4).items()},
        dict.fromkeys("qkv", (("x", "y"),)), {}, False,
    ),
    "heads": (shapes(8, 8), dict.fromkeys("qkv", HEADS), {"softcap": 3.0}, False),
    "grouped heads": (shapes(8, 4), dict.fromkeys("qkv", HEADS), {"window": (3, 3)}, False),
    "batch and heads": (shapes(8, 4), dict.fromkeys("qkv", BOTH), {"causal": True}, False),
    "one head of keys for all": (
        shapes(8, 1), {"q": BOTH, "k": BATCH, "v": BATCH}, {"causal": True}, True,
    ),
    "bias and sinks of all": (
        shapes(8, 4, **WITH_BIAS), {**dict.fromkeys("qkv", BOTH)}, {"causal": True}, True,
    ),
    "bias and sinks by heads": (
        shapes(8, 4, **WITH_BIAS), {**dict.fromkeys("qkv", HEADS), "bias": HEADS, "sinks": ("y",)},
        {}, False,
    ),
    "rows before heads": (
        {"q": (4, 6, 8, 16), "k": (4, 9, 4, 16), "v": (4, 9, 4, 16)},
        dict.fromkeys("qkv", ("x", None, "y")), {"layout": "bshd"}, False,
    ),
    "packed, by heads": (
        {"q": (11, 8, 16), "k": (11, 4, 16), "v": (11, 4, 16)},
        dict.fromkeys("qkv", HEADS),
        {"cu_q": np.array([0, 4, 11], np.int32), "cu_kv": np.array([0, 4, 11], np.int32)}, False,
    ),
    "lengths": (
        shapes(8, 4), dict.fromkeys("qkv", BATCH), {"kv_lengths": np.array([9, 3, 0, 5], np.int32)},
        False,
    ),
}  # fmt: skip


# In `make test`; the others, which compile as long, in `make test-full`.
COVERING = (
    "batch and heads",
    "one head of keys for all",
    "bias and sinks of all",
    "packed, by heads",
)
CHOSEN = tuple(CASES) if os.environ.get("FULMEN_TEST_FULL") else COVERING
IN_SHARD_MAP = ("batch", "batch and heads", "bias and sinks of all")


def placed(arrays: Arrays, specs: dict[str, Spec]) -> Arrays:
    return {
        name: jax.device_put(x, NamedSharding(mesh(), PartitionSpec(*specs.get(name, ()))))
        for name, x in arrays.items()
    }


@pytest.mark.parametrize("name", CHOSEN)
def test_a_program_splits_calls_and_gathers_nothing(name: str) -> None:
    sizes, specs, options, is_summed = CASES[name]
    arrays = drawn(sizes)
    gradient = jax.jit(jax.value_and_grad(lambda x: loss(x, options)))
    expected_loss, expected = gradient(arrays)
    compiled = gradient.lower(there := placed(arrays, specs)).compile()
    found_loss, found = compiled(there)
    text = compiled.as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    assert "collective-permute" not in text
    sums = re.findall(r"= [^\n]*f32\[[0-9,]+\][^\n]* all-reduce\(", text)  # beside that of the loss
    assert bool(sums) == is_summed, sums
    np.testing.assert_allclose(found_loss, expected_loss, atol=1e-3)  # a sum of 3,000
    for key, x in expected.items():
        np.testing.assert_allclose(found[key], x, atol=3e-5, rtol=3e-5, err_msg=key)
    assert found["q"].sharding.is_equivalent_to(there["q"].sharding, found["q"].ndim)


def test_rows_and_head_dims_are_made_whole_first() -> None:
    arrays = drawn(shapes(8, 4))
    there = placed(arrays, {"q": (None, None, "x", "y"), "k": (None, None, None, "y")})
    call = jax.jit(lambda x: fulmen.jax.attention(x["q"], x["k"], x["v"]))
    np.testing.assert_allclose(call(there), call(arrays), atol=1e-6)


def test_heads_that_share_keys_stay_together() -> None:
    """Eight devices, four heads of keys: a device cannot have half of one."""
    arrays = drawn(shapes(8, 4))
    there = placed(arrays, {"q": (None, ("y", "x"))})
    call = jax.jit(lambda x: fulmen.jax.attention(x["q"], x["k"], x["v"], causal=True))
    np.testing.assert_allclose(call(there), call(arrays), atol=1e-6)


def test_a_refusal_of_a_sharded_call_is_the_sentence_of_the_library() -> None:
    arrays = placed(drawn(shapes(8, 4)), dict.fromkeys("qkv", BATCH))
    call = jax.jit(lambda q, k, v: fulmen.jax.attention(q[:, :6], k, v))
    with pytest.raises(Exception, match="multiple"):
        jax.block_until_ready(call(*arrays.values()))


def test_dropout_drops_the_same_entries_however_arrays_are_sharded() -> None:
    arrays = drawn(shapes(8, 4))
    call = jax.jit(
        lambda x: fulmen.jax.attention(x["q"], x["k"], x["v"], dropout_p=0.5, rng=(1, 2))
    )
    there = placed(arrays, dict.fromkeys("qkv", BOTH))
    np.testing.assert_array_equal(call(there), call(arrays))


def test_vmap_of_a_sharded_call() -> None:
    arrays = drawn({name: (3, *shape) for name, shape in shapes(8, 4).items()})
    call = jax.jit(jax.vmap(fulmen.jax.attention))
    there = placed(arrays, dict.fromkeys("qkv", (None, "x", "y")))
    found = call(*there.values())
    np.testing.assert_allclose(found, call(*arrays.values()), atol=1e-6)


@pytest.mark.parametrize("name", IN_SHARD_MAP if CHOSEN != COVERING else IN_SHARD_MAP[-1:])
def test_the_gradient_inside_of_shard_map(name: str) -> None:
    """With the checks of which arrays differ between devices that shard_map makes by default."""
    sizes, specs, options, _ = CASES[name]
    arrays = drawn(sizes)
    expected = jax.jit(jax.grad(lambda x: loss(x, options)))(arrays)
    heads = {} if name != "bias and sinks of all" else {"bias": HEADS, "sinks": ("y",)}
    of_arrays = {x: PartitionSpec(*{**specs, **heads}.get(x, ())) for x in arrays}
    total = jax.shard_map(
        lambda x: jax.lax.psum(loss(x, options), ("x", "y") if specs["q"] == BOTH else "x"),
        mesh=mesh(), in_specs=(of_arrays,), out_specs=PartitionSpec(),
    )  # fmt: skip
    found = jax.jit(jax.grad(total))(placed(arrays, {}))
    for key, x in expected.items():
        np.testing.assert_allclose(found[key], x, atol=3e-5, rtol=3e-5, err_msg=key)


def test_an_exported_program_needs_no_check_disabled() -> None:
    arrays = drawn(shapes(8, 4, **WITH_BIAS))
    gradient = jax.jit(jax.grad(lambda x: loss(x, {"causal": True})))
    found = jax.export.export(gradient)(arrays).call(arrays)
    for key, x in gradient(arrays).items():
        np.testing.assert_array_equal(found[key], x, err_msg=key)


@pytest.mark.parametrize("which", ["q", "k", "kv_lengths"])
def test_a_tracer_given_to_fulmen_attention(which: str) -> None:
    given = {name: np.ones((1, 2, 3, 4), np.float32) for name in "qkv"}
    given["kv_lengths"] = np.array([3], np.int32)

    def traced(x: Any) -> Any:
        return fulmen.attention(**{**given, which: x})

    for transform, x in ((jax.jit, given[which]), (jax.vmap, given[which][None])):
        with pytest.raises(fulmen.DTypeError, match=rf"{which} is a tracer .* fulmen\.jax\.atten"):
            transform(traced)(jnp.asarray(x))


def test_rows_that_devices_share_become_heads_and_rows_again() -> None:
    """Context parallelism by heads: two constraints around the call, and XLA exchanges."""
    devices = mesh()
    by_rows, by_heads = (NamedSharding(devices, PartitionSpec(None, *axes))
                         for axes in ((None, ("x", "y")), (("x", "y"),)))  # fmt: skip
    arrays = drawn(dict.fromkeys("qkv", (2, 8, 24, 16)))

    def of(constrained: bool, q: Any, k: Any, v: Any) -> Any:
        to = jax.lax.with_sharding_constraint if constrained else lambda x, _: x
        o = fulmen.jax.attention(*(to(x, by_heads) for x in (q, k, v)), causal=True)
        return to(o, by_rows)

    placed = [jax.device_put(arrays[name], by_rows) for name in "qkv"]
    shared = jax.jit(lambda *x: of(True, *x)).lower(*placed).compile()
    assert "all-to-all" in shared.as_text()
    assert "all-gather" not in shared.as_text()
    o = shared(*placed)
    assert o.sharding.is_equivalent_to(by_rows, 4)
    np.testing.assert_array_equal(o, of(False, *(arrays[name] for name in "qkv")))

    def gradients(constrained: bool, given: Any) -> Any:
        total = jax.grad(lambda *x: jnp.sin(of(constrained, *x)).sum(), argnums=(0, 1, 2))
        return jax.jit(total)(*given)

    alone = gradients(False, [arrays[name] for name in "qkv"])
    for one, other in zip(gradients(True, placed), alone):
        np.testing.assert_array_equal(one, other)
