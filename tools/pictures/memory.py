# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Where numbers lie on a GPU, and what the plain way and tiles move, by the model of `explain`."""

from __future__ import annotations

from canvas import Box, Drawings, Picture

from fulmen.cli.io_model import FLOAT_BYTES, Call, naive, tiled

# An H200, as NVIDIA's data sheet and the Hopper white paper have it; src/plan/gpu.cpp has the same.
MULTIPROCESSORS, BANDWIDTH_TBPS, PEAK_TFLOPS = 132, 4.8, 989
MIB, GIB = 1 << 20, 1 << 30

ROWS, HEADS, DIM = 4096, 16, 128
CALL = Call(
    q_rows=ROWS,
    kv_rows=ROWS,
    heads=HEADS,
    kv_heads=HEADS,
    dim=DIM,
    dim_v=DIM,
    size=2,
    pairs=HEADS * ROWS * ROWS,
    causal=False,
)


def memory(p: Picture) -> None:
    """The levels of memory of a GPU, from the smallest and fastest to the largest."""
    levels = [
        (
            "v",
            p.say("registers", "寄存器"),
            p.say("256 KiB a multiprocessor", "每个多处理器 256 KiB"),
            p.say("S, P, O, m, l", "S、P、O、m、l"),
            210,
        ),
        (
            "k",
            p.say("shared memory", "共享内存"),
            p.say("228 KiB a multiprocessor", "每个多处理器 228 KiB"),
            p.say("tiles of Q, K, V", "Q、K、V 的 tile"),
            290,
        ),
        (
            "o",
            p.say("L2 cache", "L2 缓存"),
            p.say("50 MB for all", "共 50 MB"),
            p.say("K, V of the heads at work", "正在计算的头的 K、V"),
            370,
        ),
        (
            "q",
            p.say("global memory (HBM)", "全局内存（HBM）"),
            p.say("141 GB, {} TB/s", "141 GB，{} TB/s").format(BANDWIDTH_TBPS),
            p.say("all of Q, K, V, O", "完整的 Q、K、V、O"),
            450,
        ),
    ]
    for number, (role, name, size, holds, width) in enumerate(levels):
        at = Box(255 - width / 2, 30 + number * 68, width, 56)
        p.box(at, role)
        p.label(at, name, size, role=role, bold=True)
        p.text((530, at.y + 33), holds)
        p.line([(at.right + 8, at.y + 28), (522, at.y + 28)], "faint")
    p.text(
        (30, 330),
        p.say(
            "An H200: {} multiprocessors, {} TFLOP/s of 16-bit products. In the time in which\n"
            "memory delivers one byte, the tensor cores do {:.0f} operations: "
            "numbers must be used often.",
            "H200：{} 个多处理器，16 位乘积 {} TFLOP/s。全局内存送来一个字节的时间里，\n"
            "张量核心能做 {:.0f} 次运算：每个数取来之后要多用几次。",
        ).format(MULTIPROCESSORS, PEAK_TFLOPS, PEAK_TFLOPS / BANDWIDTH_TBPS),
    )


def _size(count: float) -> str:
    return f"{count / GIB:.3g} GiB" if count >= GIB / 2 else f"{count / MIB:.3g} MiB"


def traffic(p: Picture) -> None:
    """What crosses between global memory and the chip: the plain way, and by tiles."""
    matrix = FLOAT_BYTES * CALL.pairs
    for left, plain in ((30, True), (378, False)):
        p.text(
            (left, 36),
            p.say("The plain way", "朴素的做法")
            if plain
            else p.say("Tile by tile", "一块一块地算"),
            bold=True,
            size=15,
        )
        off, on = Box(left, 50, 312, 92), Box(left, 224, 312, 70)
        p.box(off, "plain")
        p.box(on, "plain")
        p.text((left + 14, 72), p.say("global memory", "全局内存"), role="soft", size=12.5)
        p.text((left + 14, 282), p.say("on the chip", "片上"), role="soft", size=12.5)
        for number, (name, role) in enumerate([("Q", "q"), ("K", "k"), ("V", "v"), ("O", "o")]):
            at = Box(left + 14 + number * 36, 86, 30, 40)
            p.box(at, role, radius=4)
            p.label(at, name, role=role, bold=True)
            x = at.middle[0]
            p.arrow([(x, 220), (x, 146)] if name == "O" else [(x, 146), (x, 220)], role)
        for number, name in enumerate("SP"):
            at = (
                Box(left + 168 + number * 70, 60, 62, 66)
                if plain
                else Box(left + 196 + number * 46, 236, 34, 34)
            )
            p.box(at, "hot", radius=4)
            p.label(at, name, role="hot", bold=True)
            if plain:
                p.arrow([(at.x + 20, 220), (at.x + 20, 146)], "hot")
                p.arrow([(at.x + 42, 146), (at.x + 42, 220)], "hot")
        if plain:
            said = p.say("S and P, {} each: written, then read", "S 和 P 各 {}：写出，再读回")
            p.text((left, 318), said.format(_size(matrix)), role="hot", size=12.5)
        else:
            said = p.say(
                "S and P: one tile at a time, never written", "S 和 P：每次一个 tile，从不写出"
            )
            p.text((left, 318), said, role="soft", size=12.5)
    once = CALL.row_bytes * 2 * HEADS * ROWS
    rows = [(p.say("plain", "朴素"), naive(CALL, "forward"), "hot")]
    rows += [
        (
            p.say("tiles of {} rows", "{} 行的 tile").format(tile),
            tiled(CALL, "forward", tile, 128),
            "q",
        )
        for tile in (64, 128, 192)
    ]
    rows.append((p.say("each array once", "每个数组一次"), once, "v"))
    for number, (name, count, role) in enumerate(rows):
        y = 346 + number * 28
        p.text((150, y + 15), name, anchor="end")
        width = 440 * count / rows[0][1]
        p.bar(Box(162, y, width, 20), role)
        p.text((162 + width + 10, y + 15), _size(count), role="soft")
    p.text(
        (30, 512),
        p.say(
            "Forward, {} heads of {:,} rows at d {}, 16 bits. "
            "What tiles read again comes mostly from the L2.",
            "前向，{} 个头，每头 {:,} 行，d {}，16 位。tile 重复读取的部分大多来自 L2。",
        ).format(HEADS, ROWS, DIM),
        role="soft",
        size=12.5,
    )


PICTURES: Drawings = {
    "memory": (372, ("The levels of memory of a GPU", "GPU 的存储层次"), memory),
    "traffic": (
        530,
        ("Bytes moved by the plain way and by tiles", "朴素做法与分块搬运的字节数"),
        traffic,
    ),
}
