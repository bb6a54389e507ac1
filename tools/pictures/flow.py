# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""What a kernel does one after the other, and which unit does it: three lanes, arrows between."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from canvas import Box, Drawings, Picture, Point

LANES, LEFT, GAP, TOP = 3, 40, 30, 64
WIDE = (720 - 2 * LEFT - (LANES - 1) * GAP) / LANES
HIGH, PITCH = 38, 58  # of a step, and from row to row
Words = tuple[str, str]  # English, Chinese


class Step(NamedTuple):
    """A box: where it stands, what it says."""

    lane: int
    row: int
    role: str
    words: Words

    @property
    def box(self) -> Box:
        return Box(LEFT + self.lane * (WIDE + GAP), TOP + self.row * PITCH, WIDE, HIGH)


class Flow(NamedTuple):
    """Steps by name; arrows from step to step, some with words; the arrow that goes back."""

    lanes: tuple[Words, Words, Words]
    steps: dict[str, Step]
    arrows: tuple[tuple[str, str], ...]
    around: tuple[str, str, Words]  # passes steps of its lane on the right
    again: tuple[str, str, Words]  # the loop, on the left


def _path(a: Step, b: Step) -> list[Point]:
    """From one box to another: down, sideways, or sideways and then down."""
    x, y = b.box.middle
    if a.lane == b.lane:
        return [(x, a.box.bottom), (x, b.box.y - 2)]
    right = b.lane > a.lane
    start = (a.box.right if right else a.box.x, a.box.middle[1])
    if a.row == b.row:
        return [start, (b.box.x - 2 if right else b.box.right + 2, y)]
    return [start, (x, start[1]), (x, b.box.y - 2)]


def _draw(p: Picture, flow: Flow) -> None:
    for lane, words in enumerate(flow.lanes):
        x = LEFT + lane * (WIDE + GAP) + WIDE / 2
        p.text((x, 36), p.say(*words), anchor="middle", bold=True)
    for step in flow.steps.values():
        p.box(step.box, step.role)
        p.label(step.box, p.say(*step.words), size=12.5, role=step.role)
    for a, b in flow.arrows:
        p.arrow(_path(flow.steps[a], flow.steps[b]), "soft", size=6)
    first, last = (flow.steps[name].box for name in flow.around[:2])
    x, begin, end = first.right + 12, first.middle[1], last.middle[1]
    p.arrow([(first.right, begin), (x, begin), (x, end), (last.right + 2, end)], "hot", size=6)
    middle = x + 16, (begin + end) / 2
    p.text(middle, p.say(*flow.around[2]), size=12, role="hot", anchor="middle", turned=True)
    last, first = (flow.steps[name].box for name in flow.again[:2])
    x, below, end = first.x - 14, last.bottom + 10, first.y + 0.75 * HIGH
    leaves = last.middle[0] - 30
    p.arrow([(leaves, last.bottom), (leaves, below), (x, below), (x, end), (first.x - 2, end)],
            "hot", dashed=True, size=6)  # fmt: skip
    middle = x - 6, (below + end) / 2
    p.text(middle, p.say(*flow.again[2]), size=12, role="hot", anchor="middle", turned=True)


COPIES = ("copies, under way", "复制，后台进行")
TENSOR_CORES = ("tensor cores", "张量核心")
ORDINARY = ("ordinary units", "普通单元")
FORWARD = Flow(
    (COPIES, TENSOR_CORES, ORDINARY),
    {
        "start": Step(0, 0, "q", ("Q, and K, V of the last block", "Q，以及最后一块的 K、V")),
        "wait": Step(1, 1, "plain", ("barrier: block j is there", "屏障：第 j 块已到")),
        "fetch": Step(0, 1, "k", ("K, V of a later block", "更后一块的 K、V")),
        "scores": Step(1, 2, "q", ("S = Q K_{j}^{T}", "S = Q K_{j}^{T}")),
        "full": Step(2, 2, "hot", ("do all rows see all of it?", "每一行都看到整块？")),
        "options": Step(2, 3, "plain", ("scale, softcap, bias, masks", "缩放、softcap、掩码")),
        "maximum": Step(2, 4, "plain", ("m grows: l and O follow", "m 增大：l 和 O 跟着缩放")),
        "weights": Step(2, 5, "k", ("P = exp(S - m), l += sum P", "P = exp(S - m)，l += 行和 P")),
        "output": Step(1, 6, "o", ("O += P V_{j}", "O += P V_{j}")),
        "end": Step(1, 8, "o", ("O / l,  lse = m + log l", "O / l，lse = m + log l")),
        "store": Step(0, 8, "o", ("O over Q's memory, then out", "O 放进 Q 的位置，再写出")),
    },
    (("start", "wait"), ("wait", "scores"), ("wait", "fetch"), ("scores", "full"),
     ("full", "options"), ("options", "maximum"), ("maximum", "weights"), ("weights", "output"),
     ("output", "end"), ("end", "store")),
    ("full", "weights", ("yes: m stays", "是：m 不变")),
    ("output", "fetch", ("block j - 1", "第 j - 1 块")),
)  # fmt: skip
BACKWARD = Flow(
    (COPIES, TENSOR_CORES, ORDINARY),
    {
        "start": Step(0, 0, "k", ("K, V of the block, once", "本块的 K、V，只一次")),
        "wait": Step(1, 1, "plain", ("barrier: block i is there", "屏障：第 i 块已到")),
        "fetch": Step(0, 1, "q", ("Q, dO, lse, delta of the next", "下一块的 Q、dO、lse、delta")),
        "scores": Step(1, 2, "q", ("S = Q_{i} K^{T}", "S = Q_{i} K^{T}")),
        "weights": Step(2, 2, "k", ("P = exp(S - lse)", "P = exp(S - lse)")),
        "dp": Step(1, 3, "v", ("dP = dO_{i} V^{T}", "dP = dO_{i} V^{T}")),
        "ds": Step(2, 3, "hot", ("dS = P (dP - delta)", "dS = P (dP - delta)")),
        "options": Step(2, 4, "plain", ("derivative of softcap, dbias", "softcap 的导数、dbias")),
        "round": Step(2, 5, "plain", ("P, dS to 16 bits, shared", "P、dS 舍入到 16 位，共享")),
        "dv": Step(1, 5, "v", ("dV += P^{T} dO_{i}", "dV += P^{T} dO_{i}")),
        "dk": Step(1, 6, "k", ("dK += dS^{T} Q_{i}", "dK += dS^{T} Q_{i}")),
        "dq": Step(1, 7, "o", ("dS K", "dS K")),
        "add": Step(0, 7, "o", ("added to dQ_{i}, in float32", "加到 dQ_{i} 上，float32")),
        "end": Step(1, 9, "k", ("scale dK; dV", "缩放 dK；dV")),
        "store": Step(0, 9, "k", ("dK, dV, once", "dK、dV，只写一次")),
    },
    (("start", "wait"), ("wait", "scores"), ("wait", "fetch"), ("scores", "weights"),
     ("scores", "dp"), ("dp", "ds"), ("ds", "options"), ("options", "round"), ("round", "dv"),
     ("dv", "dk"), ("dk", "dq"), ("dq", "add"), ("dq", "end"), ("end", "store")),
    ("ds", "round", ("plain scores", "没有选项")),
    ("dq", "fetch", ("block i + 1", "第 i + 1 块")),
)  # fmt: skip
DECODE = Flow(
    (("every block of threads", "每个线程块"), ("its splits of warps", "块内的各组 warp"),
     ("the last of a row", "一行的最后一块")),
    {
        "count": Step(0, 0, "plain", ("blocks of keys of all requests", "所有请求的键块数")),
        "share": Step(0, 1, "hot", ("an even share, by number", "按编号平均分得一份")),
        "ring": Step(1, 1, "k", ("K, V of the next, by the table", "按页表取下一块 K、V")),
        "scores": Step(1, 2, "q", ("S = Q K_{j}^{T}, of a group", "S = Q K_{j}^{T}，同组各头")),
        "weights": Step(1, 3, "k", ("m, P = exp(S - m), l", "m，P = exp(S - m)，l")),
        "output": Step(1, 4, "o", ("O += P V_{j}", "O += P V_{j}")),
        "splits": Step(1, 6, "o", ("O, m, l of the splits merged", "合并各组的 O、m、l")),
        "alone": Step(2, 6, "hot", ("is the row all its own?", "这一行全归自己？")),
        "part": Step(2, 7, "plain", ("part stored, arrivals counted", "存下这一段，计到达数")),
        "merge": Step(2, 8, "o", ("the last adds all, in order", "最后到的按次序相加")),
        "store": Step(2, 9, "o", ("o, lse", "o、lse")),
    },
    (("count", "share"), ("share", "ring"), ("ring", "scores"), ("scores", "weights"),
     ("weights", "output"), ("output", "splits"), ("splits", "alone"), ("alone", "part"),
     ("part", "merge"), ("merge", "store")),
    ("alone", "store", ("yes", "是")),
    ("output", "ring", ("block j + 1", "第 j + 1 块")),
)  # fmt: skip
PICTURES: Drawings = {
    name: (TOP + (max(s.row for s in flow.steps.values()) + 1) * PITCH - 4, titles,
           partial(_draw, flow=flow))
    for name, titles, flow in (
        ("flow_forward", ("The forward kernel, step by step", "前向内核逐步"), FORWARD),
        ("flow_backward", ("The backward kernel, step by step", "反向内核逐步"), BACKWARD),
        ("flow_decode", ("The decoding kernel, step by step", "解码内核逐步"), DECODE),
    )
}  # fmt: skip
