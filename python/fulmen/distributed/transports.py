# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How tensors get from rank to rank: by a group of torch.distributed, or among threads.

What travels are bytes: nothing is reduced on the way, so sums have one order whatever carries them.
Each operation begins when it is called and is waited for by `wait()` of what it returns; work of
the caller between the two hides it.
"""

from __future__ import annotations

import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, DeviceError, Error

TIMEOUT = 60.0  # seconds


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> Any:
        """Its result; raises DeviceError when a rank is gone or late."""


class Transport(ABC):
    """`size` ranks that know one another; this is number `rank`."""

    rank: int
    size: int
    timeout: float
    waits_for_gpu = False  # whether `agree` makes the host wait for a device

    @abstractmethod
    def gather(self, x: Tensor) -> Pending:
        """(size, *x.shape): the contiguous x of every rank, which all have this shape."""

    @abstractmethod
    def exchange(self, x: Tensor) -> Pending:
        """The x[this rank] of every rank, in their order; x is contiguous, (size, ...)."""

    @abstractmethod
    def shift(self, tensors: Sequence[Tensor], by: int) -> Pending:
        """Tensors of the rank `by` before this one; those given go as far to the other side."""

    @abstractmethod
    def subset(self, ranks: Sequence[int]) -> Transport:
        """Of some of the ranks, this one among them; all of them call at once."""

    def agree(self, said: str, refused: Error | None = None) -> None:
        """Compares a sentence about a call among the ranks before the call moves anything.

        Raises:
            ArgumentError: on every rank, when two say different things or one refuses the call.
        """
        text = f"!{refused}" if refused is not None else f"{zlib.crc32(said.encode()):08x} {said}"
        bytes_ = text.encode()[:_LONGEST].ljust(_LONGEST, b"\0")
        mine = torch.frombuffer(bytearray(bytes_), dtype=torch.uint8)
        texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
                 for row in self.gather_soon(mine)]  # fmt: skip
        if refused is not None:
            raise refused
        for rank, other in enumerate(texts):
            if other.startswith("!"):
                raise ArgumentError(f"rank {rank} of {self.size} refuses the call: {other[1:]}")
        for rank, other in enumerate(texts):
            if other != texts[0]:
                raise ArgumentError(
                    f"the ranks call differently: rank 0 with {texts[0][9:]}; "
                    f"rank {rank} with {other[9:]}"
                )

    def gather_soon(self, x: Tensor) -> Tensor:
        """`gather` of a tensor in host memory, within the time-out."""
        result: Tensor = self.gather(x).wait()
        return result


_LONGEST = 1000  # bytes of a sentence that ranks compare


class Group(Transport):
    """A group of torch.distributed: NCCL between GPUs, Gloo between CPUs."""

    def __init__(self, group: Any = None, timeout: float = TIMEOUT) -> None:
        """The ranks of `group`; None: all of them."""
        if not dist.is_initialized():
            raise ArgumentError(
                "torch.distributed has no group yet; torch.distributed.init_process_group(...) "
                "makes one"
            )
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.timeout = timeout
        self.waits_for_gpu = dist.get_backend(self.group) == "nccl"
        if self.rank < 0:
            raise ArgumentError("this process is no rank of the group")

    def gather(self, x: Tensor) -> Pending:
        found = x.new_empty((self.size, *x.shape))
        arguments = _bytes(found).flatten(), _bytes(x).flatten()
        start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self._pending("gather", found, lambda: [start(*arguments, self.group, True)], x)

    def exchange(self, x: Tensor) -> Pending:
        found = torch.empty_like(x)
        arguments = _bytes(found).flatten(1), _bytes(x).flatten(1)
        start = dist.all_to_all_single
        return self._pending(
            "exchange", found, lambda: [start(*arguments, group=self.group, async_op=True)], x
        )

    def shift(self, tensors: Sequence[Tensor], by: int) -> Pending:
        to, source = ((self.rank + d) % self.size for d in (by, -by))
        found = [torch.empty_like(x) for x in tensors]
        to, source = (dist.get_global_rank(self.group, rank) for rank in (to, source))
        steps = [dist.P2POp(dist.isend, _bytes(x), to, self.group) for x in tensors]
        steps += [dist.P2POp(dist.irecv, _bytes(x), source, self.group) for x in found]
        return self._pending("shift", found, lambda: dist.batch_isend_irecv(steps), tensors)

    def subset(self, ranks: Sequence[int]) -> Transport:
        members = [dist.get_global_rank(self.group, rank) for rank in ranks]
        made = dist.new_group(
            members,
            timeout=timedelta(seconds=self.timeout),
            backend=dist.get_backend(self.group),
            use_local_synchronization=True,
        )
        return Group(made, self.timeout)

    def gather_soon(self, x: Tensor) -> Tensor:
        if not self.waits_for_gpu:
            return super().gather_soon(x)
        found = self.gather(x.cuda())
        assert isinstance(found, _Works)
        end = time.monotonic() + self.timeout
        while not found.is_completed():
            if time.monotonic() > end:
                raise DeviceError(self._late("comparing the call", "no answer"))
            time.sleep(0.0005)
        return found.wait().cpu()

    def _pending(
        self, name: str, result: Any, start: Callable[[], Sequence[Any]], sent: Any
    ) -> Pending:
        try:
            return _Works(self, name, result, start(), sent)
        except RuntimeError as error:
            raise DeviceError(self._late(name, str(error))) from error

    def _late(self, name: str, why: str) -> str:
        why = " ".join(why.split())[:200]
        return (
            f"rank {self.rank} of {self.size}: {name} did not end within {self.timeout:g} seconds, "
            f"or another rank is gone ({why}); no result of the call is valid"
        )


def _bytes(x: Tensor) -> Tensor:
    """Bits that any transport moves, whatever the dtype."""
    return x.view(torch.uint8) if x.dim() else x.view(1).view(torch.uint8)


class _Works:
    """Operations of torch.distributed, with what they write, and read until they are waited for."""

    def __init__(
        self, group: Group, name: str, result: Any, works: Sequence[Any], sent: Any
    ) -> None:
        self.group, self.name, self.result, self.works = group, name, result, works
        self.sent = sent

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> Any:
        limit = timedelta(seconds=self.group.timeout)
        try:
            for work in self.works:
                # NCCL orders streams and returns; its watchdog has the time-out of the group.
                work.wait() if self.group.waits_for_gpu else work.wait(limit)
        except RuntimeError as error:
            raise DeviceError(self.group._late(self.name, str(error))) from error
        return self.result


class Alone(Transport):
    """One rank: what it sends arrives."""

    rank, size, timeout = 0, 1, TIMEOUT

    def gather(self, x: Tensor) -> Any:
        return _Here(x.unsqueeze(0))

    def exchange(self, x: Tensor) -> Any:
        return _Here(x)

    def shift(self, tensors: Any, by: int) -> Any:
        return _Here(list(tensors))

    def subset(self, ranks: Any) -> Transport:
        return self


class _Here:
    def __init__(self, x: Any) -> None:
        self.x = x

    def wait(self) -> Any:
        return self.x


class _Board:
    """Where threads put what they send."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[Any, Any] = {}
        self.failure: str | None = None

    def put(self, key: Any, value: Any) -> None:
        with self.changed:
            self.sent[key] = value
            self.changed.notify_all()

    def take(self, key: Any, timeout: float, who: str) -> Any:
        with self.changed:
            ok = self.changed.wait_for(
                lambda: key in self.sent or self.failure is not None, timeout
            )
            if key in self.sent:
                return self.sent.pop(key)
            why = self.failure if ok else "no answer"
            raise DeviceError(
                f"{who}: another rank is gone or did not answer within {timeout:g} seconds "
                f"({why}); no result of the call is valid"
            )

    def fail(self, why: str) -> None:
        with self.changed:
            self.failure = self.failure or why
            self.changed.notify_all()


class Threads(Transport):
    """Ranks that are threads of this process, with tensors in host memory."""

    def __init__(self, board: _Board, ranks: Sequence[int], me: int, timeout: float) -> None:
        self.board, self.ranks, self.timeout = board, tuple(ranks), timeout
        self.rank, self.size = self.ranks.index(me), len(ranks)
        self._count = 0

    def _send(self, values: dict[int, Any], sources: Sequence[int], join: Any) -> Pending:
        self._count += 1
        op = (self.ranks, self._count)
        me = self.ranks[self.rank]
        for rank, value in values.items():
            self.board.put((op, me, self.ranks[rank]), value)
        keys = [(op, self.ranks[rank], me) for rank in sources]
        return _Taken(self, keys, join)

    def gather(self, x: Tensor) -> Pending:
        every = range(self.size)
        x = x.clone()
        return self._send(dict.fromkeys(every, x), every, torch.stack)

    def exchange(self, x: Tensor) -> Pending:
        every = range(self.size)
        return self._send({rank: x[rank].clone() for rank in every}, every, torch.stack)

    def shift(self, tensors: Sequence[Tensor], by: int) -> Pending:
        to, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        return self._send({to: [x.clone() for x in tensors]}, [source], lambda found: found[0])

    def subset(self, ranks: Sequence[int]) -> Transport:
        members = [self.ranks[rank] for rank in ranks]
        return Threads(self.board, members, self.ranks[self.rank], self.timeout)


class _Taken:
    def __init__(self, transport: Threads, keys: list[Any], join: Any) -> None:
        self.transport, self.keys, self.join = transport, keys, join

    def wait(self) -> Any:
        own = self.transport
        who = f"rank {own.rank} of {own.size}"
        return self.join([own.board.take(key, own.timeout, who) for key in self.keys])


def in_process(
    size: int, function: Callable[[Transport], Any], *, timeout: float = TIMEOUT
) -> list[Any]:
    """Runs `function` on ranks that are threads of this process: for tests, without a launcher.

    Args:
        size: how many ranks.
        function: called once a rank with its transport, which `context_parallel` takes as group.
        timeout: seconds that a rank waits for another.

    Returns:
        What the ranks returned, in their order.

    Raises:
        BaseException: the first that a rank raised; the others' waits end with it.
    """
    board = _Board()
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(Threads(board, range(size), rank, timeout))
        except BaseException as error:
            errors.append((rank, error))
            board.fail(f"rank {rank} ended with {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
    return results
