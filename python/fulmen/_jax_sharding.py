# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How XLA may split a call of fulmen.jax over devices: by batch entries and by heads.

Each device then calls the library on its part, and nothing is gathered. Query heads that share a
key/value head stay together, unless all share one: then each device has that one whole. Rows and
head dims are never split. A gradient that sums over what is split is summed over the devices.
With dropout nothing is split: which entries are dropped depends on the numbers of batch and head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

import jax

from ._library import schema
from .layouts import Layout

Shape = tuple[int, ...]
Spread = dict[str, tuple[str, ...]]  # axes of the mesh that "batch", "head", "kv_head" are split by


class Split(NamedTuple):
    """What of a call may be split: arrays with the names of their axes, None for what stays whole.

    Attributes:
        arguments: of each argument.
        results: of each result.
        sizes: of "batch", "head" and "kv_head", where q and k have them.
        q: which argument is q: the others are split as it is.
    """

    arguments: tuple[tuple[str | None, ...], ...]
    results: tuple[tuple[str | None, ...], ...]
    sizes: dict[str, int]
    q: int

    @classmethod
    def of(
        cls, arguments: dict[str, Shape], results: dict[str, Shape], layout: Layout, is_whole: bool
    ) -> Split:
        """Of a call with these arrays; is_whole: nothing may be split."""
        sizes: dict[str, int] = {}
        for name in ("q", "k"):
            sizes.update(zip(_axes(name, arguments[name], layout), arguments[name]))
        kept = {x: n for x, n in sizes.items() if x in ("batch", "head", "kv_head")}
        if kept.get("head", 0) % max(kept.get("kv_head", 1), 1):
            kept = {}  # the library refuses the call: each device sees it whole

        def named(arrays: dict[str, Shape]) -> tuple[tuple[str | None, ...], ...]:
            return tuple(
                tuple(
                    axis if not is_whole and kept.get(axis) == extent else None
                    for axis, extent in zip(_axes(name, shape, layout), shape)
                )
                for name, shape in arrays.items()
            )

        return cls(named(arguments), named(results), kept, list(arguments).index("q"))

    def rule(self) -> tuple[str, dict[str, Any]]:
        """For Shardy: one factor an axis that may be split; each other axis has one of its own."""
        heads, kv_heads = self.sizes.get("head", 1), self.sizes.get("kv_head", 1)
        factors = {"batch": "b", "head": "h", "kv_head": "h"}
        sizes: dict[str, Any] = {}
        if 1 < kv_heads < heads and heads % kv_heads == 0:
            factors.update(head="(g r)", kv_head="g")
            sizes["r"] = heads // kv_heads
        whole: list[str] = []

        def text(arrays: tuple[tuple[str | None, ...], ...]) -> str:
            return ", ".join(" ".join(factor(axis) for axis in array) for array in arrays)

        def factor(axis: str | None) -> str:
            if axis is not None and not (axis == "kv_head" and kv_heads == 1 < heads):
                return factors[axis]
            whole.append(f"x{len(whole)}")
            return whole[-1]

        rule = f"{text(self.arguments)} -> {text(self.results)}"
        if not any("(" in word for word in rule.split()):
            sizes = {}
        return rule, {"need_replication_factors": tuple(whole), **sizes}

    def spread(self, mesh: Any, arguments: Any) -> Spread:
        """How a call is split whose arguments have these shardings."""
        sharding = arguments[self.q].sharding
        spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
        found: Spread = {"batch": (), "head": (), "kv_head": ()}
        for axis, entry in zip(self.arguments[self.q], spec):
            if axis is not None and entry is not None:
                found[axis] = (entry,) if isinstance(entry, str) else tuple(entry)
        kv_heads = self.sizes.get("kv_head", 1)
        if kv_heads > 1:
            devices, taken = 1, []
            for name in found["head"]:
                devices *= mesh.shape[name]
                if kv_heads % devices:
                    break
                taken.append(name)
            found["head"] = found["kv_head"] = tuple(taken)
        return found


def _axes(name: str, shape: Shape, layout: Layout) -> list[str]:
    """The names of the axes of an array, in the order of a layout."""
    array = schema().arrays[name]
    axes = list(array["axes"])
    if array["has_head_and_row"] and layout.rows_before_heads:
        axes[1], axes[2] = axes[2], axes[1]
    return axes[len(axes) - len(shape) :]


def _spec(axes: Sequence[str | None], spread: Spread) -> PartitionSpec:
    return PartitionSpec(*(None if x is None else spread[x] or None for x in axes))


def _local(shape: Shape, axes: Sequence[str | None], spread: Spread, mesh: Any) -> Shape:
    """The part of a shape that one device has."""
    names = [() if x is None else spread[x] for x in axes]
    parts = (math.prod(mesh.shape[name] for name in each) for each in names)
    return tuple(extent // count for extent, count in zip(shape, parts))


def split_over_devices(call: Callable[..., Any], split: Split, results: Sequence[Any]) -> Any:
    """A function of arrays that XLA splits over devices as `split` says.

    Args:
        call: `call(results)(*arrays)` computes results of these shapes and dtypes.
        split: which axes may be split.
        results: jax.ShapeDtypeStruct of the whole results.
    """

    whole: Any = custom_partitioning(call(results))

    def shardings(mesh: Any, axes: Iterable[Sequence[str | None]], spread: Spread) -> Any:
        return tuple(NamedSharding(mesh, _spec(each, spread)) for each in axes)

    def infer(mesh: Any, arguments: Any, made: Any) -> Any:
        return shardings(mesh, split.results, split.spread(mesh, arguments))

    def partition(mesh: Any, arguments: Any, made: Any) -> Any:
        spread = split.spread(mesh, arguments)
        used = {*spread["batch"], *spread["head"]}

        def part(*arrays: Any) -> Any:
            here = [
                jax.ShapeDtypeStruct(_local(x.shape, axes, spread, mesh), x.dtype)
                for x, axes in zip(results, split.results)
            ]
            found = call(here)(*arrays)
            return tuple(
                summed(x, used.difference(*(spread[axis] for axis in axes if axis is not None)))
                for x, axes in zip(found, split.results)
            )

        return (
            mesh,
            part,
            shardings(mesh, split.results, spread),
            shardings(mesh, split.arguments, spread),
        )

    def summed(x: Any, names: set[str]) -> Any:
        return jax.lax.psum(x, tuple(sorted(names))) if names else x

    rule, more = split.rule()
    whole.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule, **more)
    return whole
