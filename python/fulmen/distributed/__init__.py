# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: one sequence over many devices, with the masks of one call, for PyTorch.

    cp = fulmen.distributed.context_parallel(group)
    x, place = cp.shard(x), cp.positions(x.device)  # the rows of this rank, for RoPE their places
    o = cp.attention(q, k, v, causal=True)          # of all keys of all ranks
    y = cp.unshard(y)

Every rank calls the same in the same order. What travels goes through torch.distributed (NCCL,
Gloo); `in_process` runs ranks as threads instead.

Sources: Liu et al., Ring Attention (2023); Jacobs et al., DeepSpeed Ulysses (2023); Fang and Zhao,
USP (2024); Grattafiori et al., Llama 3 (2024), 3.3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, Error, ShapeError, one_of, whole
from . import traced
from .autograd import Attention, Call, Unshard
from .parts import Segment
from .prediction import Prediction, predict
from .problem import Problem, positions_of
from .shards import BY_NAME, Shards, balanced, contiguous, zigzag
from .transports import TIMEOUT, Alone, Group, Transport, in_process

__all__ = [
    "ContextParallel", "Prediction", "Segment", "Shards", "Transport", "balanced",
    "context_parallel", "contiguous", "in_process", "predict", "zigzag",
]  # fmt: skip

_SCHEDULES = ("auto", "gather", "ring", "heads")
_AXES = ("bhsd", "bshd")
_MOST_GATHERED = 4 << 30  # bytes of all keys and values on a device, where "auto" still gathers


def context_parallel(
    group: Any = None,
    *,
    length: int | None = None,
    layout: str | Shards = "auto",
    schedule: str = "auto",
    heads: int = 1,
    timeout: float = TIMEOUT,
) -> ContextParallel:
    """Shares sequences among the ranks of a group; every rank calls it.

    Args:
        group: of torch.distributed, None: all ranks; a one-dimensional DeviceMesh; or a transport
            of `in_process`.
        length: rows of the sequence, where `shard` does not cut it; it may also be set later.
        layout: which rows a rank has: "zigzag" ("auto": chunks r and 2 n - 1 - r, the same work for
            all ranks under causal), "contiguous" (short windows: few ranks see each other), or what
            `zigzag`, `contiguous`, `balanced` return.
        schedule: "gather" (all keys to all ranks), "ring" (keys from rank to rank, those of two
            ranks at a time on each), "heads" (all rows of some heads to each rank: Ulysses), or
            "auto": gather while all keys and values are below 4 GiB, then ring.
        heads: how many neighbours share rows by heads before gather or ring go over the rest: the
            two-dimensional schedule. It divides the ranks, and divides the heads.
        timeout: seconds that a rank waits for another where the host waits. Between GPUs NCCL's own
            time-out, that of the group, is for what runs there.

    Raises:
        ArgumentError: a word or a number that is not allowed, no group.
    """
    transport = group if isinstance(group, Transport) else Group(_group_of(group), timeout)
    return ContextParallel(transport, length, layout, schedule, heads)


def _group_of(group: Any) -> Any:
    if group is None or not hasattr(group, "get_group"):
        return group
    if group.ndim != 1:
        raise ArgumentError(
            f"the mesh has {group.ndim} dimensions; mesh['name'] is the one to share sequences over"
        )
    return group.get_group()


class ContextParallel:
    """Ranks that share sequences; made by `context_parallel`. One thread calls it at a time."""

    def __init__(
        self, transport: Transport, length: int | None, layout: Any, schedule: str, heads: int
    ) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        if not isinstance(layout, Shards):
            layout = one_of("layout", layout, ("auto", *BY_NAME))
            layout = "zigzag" if layout == "auto" else layout
        elif len(layout.check().segments) != self.size:
            raise ArgumentError(
                f"the layout has shards for {len(layout.segments)} ranks; the group has {self.size}"
            )
        self.layout = layout
        self.schedule = one_of("schedule", schedule, _SCHEDULES)
        self.inner_size = self.size if schedule == "heads" else whole("heads", heads, 1)
        if self.size % self.inner_size:
            raise ArgumentError(f"heads is {heads}; a divisor of the {self.size} ranks is allowed")
        self._shards: Shards | None = layout if isinstance(layout, Shards) else None
        if length is not None:
            self.length = length
        self._subsets: tuple[Transport, Transport] | None = None
        self.number = traced.numbered(self)

    @property
    def length(self) -> int:
        """Rows of the whole sequence."""
        return self.shards.length

    @length.setter
    def length(self, length: int) -> None:
        if isinstance(self.layout, Shards):
            if length != self.layout.length:
                raise ShapeError(
                    f"the sequence has {length} rows, and the layout's shards {self.layout.length}"
                )
        elif self._shards is None or self._shards.length != length:
            self._shards = BY_NAME[self.layout](length, self.size)

    @property
    def shards(self) -> Shards:
        """Which rows each rank has."""
        if self._shards is None:
            raise ArgumentError(
                "the length of the sequence is not known: cp.shard(x), or length= of "
                "context_parallel, says it"
            )
        return self._shards

    def positions(self, device: Any = None) -> Tensor:
        """(row,) int64: where the rows of this rank are in the sequence: for RoPE."""
        return positions_of(self.shards.segments[self.rank], device).clone()

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The rows of this rank of an array that every rank has whole; differentiable.

        Args:
            x: with the rows of the sequence along `dim`; its length becomes that of the sequence.
        """
        self.length = x.shape[dim]
        return x.index_select(dim, self.positions(x.device))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence from the rows of each rank, on every rank.

        Its gradient is that of a loss which every rank computes alike: a rank keeps its rows of it.

        Args:
            x: with the rows of this rank along `dim`; other extents are those of the other ranks.
        """
        rows = self.shards.rows(self.rank)
        if x.shape[dim] != rows:
            raise ShapeError(
                f"x has {x.shape[dim]} rows along dim {dim}; this rank has {rows} of the "
                f"{self.length} of the sequence"
            )
        whole: Tensor = Unshard.apply(self.transport, self.shards, x, dim)
        return whole

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layout: str = "bhsd",
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """`fulmen.attention` of the whole sequence: the rows of this rank to the keys of all.

        Args:
            q: (batch, head, row, dim_qk), the rows of this rank, in the order that `layout` names.
            k: (batch, kv_head, row, dim_qk), of the same rows.
            v: (batch, kv_head, row, dim_v), likewise.
            layout: "bhsd" or "bshd".
            return_lse: return (o, lse), lse (batch, head, row), differentiable too.
            **options: scale, softcap, causal, window, mask, score, alibi_slopes, sinks, dropout_p
                with rng (the same on every rank), precision, deterministic, batch_invariant,
                implementation: as in `fulmen.attention` of the whole sequence. Document numbers are
                of all its rows, on every rank; texts read arrays by positions in it. Gradients of
                sinks, and of what texts read, are those of the rows of this rank, to be summed over
                the group as those of weights are.

        Returns:
            o of the rows of this rank as q, or (o, lse); differentiable once.

        Raises:
            fulmen.Error: on every rank, when one refuses the call or two call differently: ranks
                compare calls before anything moves; on NCCL those of a kind that is new.
            DeviceError: a rank is gone or late.
        """
        if torch.compiler.is_compiling():
            o, lse = traced.attention(self, q, k, v, layout, options)
        else:
            call = self._agreed(q, k, v, layout, options)
            floats = call.problem.differentiable
            o, lse = Attention.apply(
                call, tuple(floats), q, k, v, call.problem.sinks, *floats.values()
            )
        return (o, lse) if return_lse else o

    def _agreed(
        self, q: Tensor, k: Tensor, v: Tensor, layout: str, options: dict[str, Any]
    ) -> Call:
        """The call, which all ranks make alike."""
        refused, said, call = None, "", None
        try:
            call = self._call(q, k, v, layout, options)
            said = call.said
        except Error as error:
            refused = error
        self._compare(said, refused)
        assert call is not None
        return call

    def explain(
        self, q: Any, k: Any, *, dim_v: int | None = None, link: Any = None, **options: Any
    ) -> Prediction:
        """What a call would do: schedule, steps, bytes, balance and predicted time.

        Args:
            q, k: (batch, head, row, dim) shapes of the whole sequence: (b, h, length, d).
            dim_v: head dim of v; None: that of k.
            link: GB/s in one direction of each device's link, or a pair as in `predict`; None:
                NVLink of an H200.
            **options: as in `attention`.
        """
        self.length = q[2]
        problem = Problem(options, self.length, "cpu")
        name = self._schedule_of(tuple(k), k[3] if dim_v is None else dim_v, 2)
        return predict(
            self.shards, problem, tuple(q), tuple(k), dim_v, schedule=name,
            inner=self.inner_size, link=link,
        )  # fmt: skip

    _said: frozenset[str] = frozenset()

    def _compare(self, said: str, refused: Error | None) -> None:
        """Compares a call among the ranks; where it costs a wait for a GPU, each kind once."""
        is_known = said in self._said and refused is None
        if is_known and self.transport.waits_for_gpu:
            return
        self.transport.agree(said, refused)
        self._said = self._said | {said}

    def _schedule_of(self, k_shape: tuple[int, ...], dim_v: int, itemsize: int) -> str:
        if self.schedule == "heads":
            return "gather"  # among the one rank that is left
        if self.schedule != "auto":
            return self.schedule
        whole_bytes = k_shape[0] * k_shape[1] * self.length * (k_shape[3] + dim_v) * itemsize
        return "gather" if whole_bytes // self.inner_size <= _MOST_GATHERED else "ring"

    def _call(self, q: Tensor, k: Tensor, v: Tensor, layout: str, options: dict[str, Any]) -> Call:
        layout = one_of("layout", layout, _AXES)
        shape = tuple(getattr(k, "shape", ()))
        name = "gather"
        if len(shape) == 4:
            heads_first = shape if layout == "bhsd" else (shape[0], shape[2], shape[1], shape[3])
            name = self._schedule_of(heads_first, v.shape[-1], k.element_size())
        arrays = (q, k, v)
        return Call(self._pair(), self.rank, self.shards, name, arrays, layout, options)

    def _pair(self) -> tuple[Transport, Transport]:
        """Those that share rows by heads with this rank, and those that gather or ring."""
        if self._subsets is None:
            inner, size = self.inner_size, self.size
            first = self.rank // inner * inner
            if inner == 1:
                self._subsets = Alone(), self.transport
            elif inner == size:
                self._subsets = self.transport, Alone()
            else:
                near = self.transport.subset(range(first, first + inner))
                self._subsets = near, self.transport.subset(range(self.rank % inner, size, inner))
        return self._subsets
