# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""The backward pass: five products of a pair of tiles, and which thread block sums what."""

from __future__ import annotations

from canvas import Box, Drawings, Picture


def _grid(p: Picture) -> None:
    """Pairs of tiles; a column is one thread block's."""
    left, top, pitch, count, own = 74, 96, 42, 5, 2
    p.text(
        (30, 38), p.say("A block of keys is a work tile", "一个键块就是一个 work tile"), bold=True
    )
    for j in range(count):
        at = Box(left + j * pitch + 2, 54, pitch - 4, 28)
        role = "k" if j == own else "plain"
        p.box(at, role)
        p.label(at, f"K_{{{j}}}V_{{{j}}}", size=12.5, role=role, bold=j == own)
        for i in range(count):
            cell = Box(left + j * pitch + 3, top + i * pitch + 3, pitch - 6, pitch - 6)
            p.box(cell, "hot" if j == own else "plain", radius=4)
    for i in range(count):
        y = top + i * pitch
        at = Box(left - 46, y + 5, 36, pitch - 10)
        p.box(at, "q")
        p.label(at, f"Q_{{{i}}}", size=12.5, role="q")
        at = Box(left + count * pitch + 20, y + 5, 42, pitch - 10)
        p.box(at, "o")
        p.label(at, f"dQ_{{{i}}}", size=12.5, role="o")
        p.arrow([(left + count * pitch + 2, y + pitch / 2), (at.x - 3, y + pitch / 2)], "o", size=6)
    x = left + own * pitch + pitch / 2
    p.arrow([(x, top + 14), (x, top + count * pitch - 12)], "hot")
    p.arrow([(x, top + count * pitch + 2), (x, top + count * pitch + 18)], "k", size=6)
    at = Box(x - 56, top + count * pitch + 22, 112, 30)
    p.box(at, "k")
    p.label(at, f"dK_{{{own}}}, dV_{{{own}}}", role="k", bold=True)
    y = top + count * pitch + 80
    p.text(
        (30, y),
        p.say("dK, dV: one thread block, in registers", "dK、dV：一个线程块，在寄存器中累加"),
        role="k",
    )
    p.text(
        (30, y + 22),
        p.say("dQ: every block of keys adds its share", "dQ：每个键块都加上自己的一份"),
        role="o",
    )


def backward(p: Picture) -> None:
    """Who makes dQ, dK and dV."""
    _grid(p)
    left, width = 400, 290
    p.text(
        (left, 38),
        p.say("A step: one pair of tiles, five products", "一步：一对 tile，五次乘积"),
        bold=True,
    )
    steps = [
        (
            "1",
            "S^{T} = K Q^{T}",
            "P^{T} = exp(S^{T} - lse)",
            "hot",
            p.say("again, from what forward kept of a row", "由前向每行保留的数重新算出"),
        ),
        (
            "2",
            "dP^{T} = V dO^{T}",
            "dS^{T} = P^{T} * (dP^{T} - delta)",
            "hot",
            "delta = rowsum(dO * O)",
        ),
        ("3", "dV += P^{T} dO", "", "k", p.say("registers of the block of keys", "该键块的寄存器")),
        ("4", "dK += dS^{T} Q", "", "k", p.say("registers of the block of keys", "该键块的寄存器")),
        (
            "5",
            "dQ += dS K",
            "",
            "o",
            p.say("float32 sums in global memory", "全局内存中的 float32 累加"),
        ),
    ]
    y = 54.0
    for number, product, then, role, where in steps:
        high = 76 if then else 52
        at = Box(left, y, width, high)
        p.box(at, role)
        p.text((left + 14, y + 22), number, role=role, bold=True, size=14)
        p.text((left + 38, y + 22), product, bold=True, role=role, size=14)
        if then:
            p.text((left + 38, y + 44), then, role=role, size=14)
        p.text((left + 38, y + high - 11), where, role="soft", size=12)
        y += high + 9
    p.text(
        (left, y + 18),
        p.say("P and dS never leave the chip; neither does S.", "P 和 dS 从不离开芯片，S 也是。"),
        role="soft",
    )


PICTURES: Drawings = {
    "backward": (446, ("Who makes dQ, dK and dV", "dQ、dK、dV 由谁计算"), backward),
}
