# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""forward_sm90: its roles with what they hand to each other, and a work tile in time."""

from __future__ import annotations

from dataclasses import dataclass, field

from canvas import Box, Drawings, Picture

STAGES, WARPGROUPS = 2, 2


def hopper_roles(p: Picture) -> None:
    """Scheduler, producer, ring of stages, consumers; d 128, two consumer warpgroups."""
    memory = Box(30, 96, 92, 250)
    p.box(memory, "plain")
    p.label(memory, p.say("global", "全局"), p.say("memory", "内存"), bold=False, role="soft")
    warps = Box(150, 48, 158, 298)
    p.box(warps, "plain", dashed=True)
    p.text((150, 36), p.say("producer warpgroup", "生产者 warpgroup"), bold=True)
    schedule = Box(164, 64, 130, 76)
    p.box(schedule, "o")
    p.label(
        schedule,
        p.say("tile scheduler", "tile 调度器"),
        p.say("1 warp", "1 个 warp"),
        role="o",
        bold=True,
    )
    produce = Box(164, 172, 130, 76)
    p.box(produce, "q")
    p.label(
        produce,
        p.say("producer", "生产者"),
        p.say("1 thread, TMA", "1 个线程，TMA"),
        role="q",
        bold=True,
    )
    p.arrow([(229, 144), (229, 168)], "o")
    p.label(
        Box(154, 296, 150, 40),
        p.say("40 registers a thread", "每线程 40 个寄存器"),
        size=12,
        role="soft",
    )
    shared = Box(378, 48, 128, 298)
    p.box(shared, "plain")
    p.text((378, 36), p.say("shared memory", "共享内存"), bold=True)
    next_q = p.say("next Q_{{{}}}", "下一个 Q_{{{}}}")
    slots = [("Q_{0}", "q"), ("Q_{1}", "q"), (next_q.format(0), "q"), (next_q.format(1), "q")]
    slots += [("K_{7}", "k"), ("K_{6}", "k"), ("V_{7}", "v"), ("V_{6}", "v")]
    for number, (name, role) in enumerate(slots):
        gap = 0 if number < 4 else 6 if number < 6 else 12
        at = Box(392, 56 + number * 34 + gap, 100, 30)
        p.box(at, role)
        p.label(at, name, role=role, bold=True)
    p.arrow([(297, 200), (374, 200)], "ink")
    p.arrow([(374, 226), (297, 226)], "ink", dashed=True)
    p.text((342, 191), p.say("full", "满"), anchor="middle", size=12, role="soft")
    p.text((342, 245), p.say("empty", "空"), anchor="middle", size=12, role="soft")
    p.arrow([(125, 210), (160, 210)], "q")
    for number in range(WARPGROUPS):
        y = 64 + number * 154
        at = Box(562, y, 128, 128)
        p.box(at, "hot")
        p.label(
            at,
            p.say("consumer {}", "消费者 {}").format(number),
            "S = Q K^{T}",
            "softmax",
            "O += P V",
            p.say("64 rows", "64 行"),
            role="hot",
            bold=True,
        )
        p.arrow([(510, y + 50), (558, y + 50)], "ink")
        p.arrow([(558, y + 78), (510, y + 78)], "ink", dashed=True)
    p.arrow([(614, 196), (614, 214)], "hot", size=6)
    p.arrow([(638, 214), (638, 196)], "hot", size=6)
    p.text((626, 36), p.say("consumers", "消费者"), anchor="middle", bold=True)
    p.text(
        (626, 364),
        p.say("232 registers a thread", "每线程 232 个寄存器"),
        size=12,
        role="soft",
        anchor="middle",
    )
    p.arrow([(626, 372), (626, 392), (76, 392), (76, 350)], "o")
    p.text(
        (343, 412),
        p.say("O, through shared memory and TMA", "O，经由共享内存和 TMA"),
        anchor="middle",
        role="o",
        size=12.5,
    )
    p.text(
        (30, 446),
        p.say(
            "Solid: the bytes of a stage have landed (full mbarrier). "
            "Dashed: all consumers have read it (empty).\n"
            "Red: whose turn it is at the tensor cores (ping-pong, a named barrier each).",
            "实线：一级的字节已到达（full mbarrier）。虚线：所有消费者都已读完（empty）。\n"
            "红线：轮到谁使用张量核心（乒乓，各有一个命名屏障）。",
        ),
        size=12,
        role="soft",
    )


@dataclass
class Schedule:
    """A work tile in time, in the order in which the kernel issues it; durations of a model."""

    blocks: int = 5
    product: float = 2.0  # S or O of one warpgroup
    softmax: float = 3.1
    load: float = 1.6
    loads: list[tuple[str, float, float]] = field(default_factory=list)
    products: list[tuple[int, str, float, float]] = field(default_factory=list)  # by warpgroup
    softmaxes: list[tuple[int, str, float, float]] = field(default_factory=list)

    def run(self) -> float:
        """Fills the lists; returns the end."""
        tensor_cores = 0.0
        ready = [0.0] * WARPGROUPS
        landed: dict[str, float] = {}
        released: dict[str, float] = {}
        order = ["Q", f"K{self.blocks - 1}"]
        order = order[::-1]
        for j in range(self.blocks - 2, -1, -1):
            order += [f"K{j}", f"V{j + 1}"]
        order.append("V0")

        def fetch(name: str) -> float:
            while name not in landed:
                tile = order[len(landed)]
                begin = self.loads[-1][2] if self.loads else 0.0
                before = f"{tile[0]}{int(tile[1:]) + STAGES}" if tile != "Q" else ""
                begin = max(begin, released.get(before, 0.0))
                self.loads.append((tile, begin, begin + self.load))
                landed[tile] = begin + self.load
            return landed[name]

        for j in range(self.blocks - 1, -2, -1):
            for warpgroup in range(WARPGROUPS):
                at = max(tensor_cores, ready[warpgroup])
                end_of_scores = at
                if j >= 0:
                    at = max(at, fetch(f"K{j}"), fetch("Q"))
                    end_of_scores = at + self.product
                    self.products.append((warpgroup, f"S{j}", at, end_of_scores))
                    self.softmaxes.append(
                        (warpgroup, f"P{j}", end_of_scores, end_of_scores + self.softmax)
                    )
                    released[f"K{j}"] = end_of_scores
                    at = end_of_scores
                if j + 1 < self.blocks:
                    at = max(at, fetch(f"V{j + 1}"))
                    self.products.append((warpgroup, f"O{j + 1}", at, at + self.product))
                    at += self.product
                    released[f"V{j + 1}"] = at
                tensor_cores = at
                ready[warpgroup] = max(at, end_of_scores + self.softmax) if j >= 0 else at
        return tensor_cores


def hopper_time(p: Picture) -> None:
    """Loads, products and exponentials of two warpgroups that alternate at the tensor cores."""
    schedule = Schedule()
    end = schedule.run()
    left, scale = 118, 572 / end
    lanes = [
        (p.say("TMA loads", "TMA 装载"), 60),
        (p.say("tensor cores", "张量核心"), 124),
        (p.say("softmax of 0", "0 的 softmax"), 188),
        (p.say("softmax of 1", "1 的 softmax"), 232),
    ]
    for name, y in lanes:
        p.text((left - 12, y + 20), name, anchor="end")
        p.line([(left, y + 34), (690, y + 34)], "faint")

    def draw(y: float, name: str, begin: float, finish: float, role: str, words: str = "") -> None:
        at = Box(left + begin * scale + 1, y, (finish - begin) * scale - 2, 30)
        p.box(at, role, radius=4)
        p.text(
            (at.middle[0], y + 20),
            words or f"{name[0]}_{{{name[1:]}}}",
            anchor="middle",
            size=12,
            role=role,
        )

    for name, begin, finish in schedule.loads:
        draw(60, name, begin, finish, name[0].lower(), "Q" if name == "Q" else "")
    for warpgroup, name, begin, finish in schedule.products:
        draw(124, name, begin, finish, ("hot", "o")[warpgroup])
    for warpgroup, name, begin, finish in schedule.softmaxes:
        draw((188, 232)[warpgroup], name, begin, finish, ("hot", "o")[warpgroup])
    p.arrow([(left, 284), (690, 284)], "soft")
    p.text((690, 304), p.say("time", "时间"), anchor="end", role="soft")
    p.legend(
        (left, 304),
        [
            ("hot-cell", p.say("warpgroup 0", "warpgroup 0")),
            ("o-cell", p.say("warpgroup 1", "warpgroup 1")),
        ],
    )
    p.text(
        (30, 36),
        p.say(
            "One work tile of five blocks of keys, from the last to the first",
            "一个 work tile，五个键块，从最后一个到第一个",
        ),
        bold=True,
    )
    p.text(
        (30, 338),
        p.say(
            "S_{j} and O_{j+1} are issued together; P_{j} is computed under O_{j+1} (overlap) "
            "and under the products\nof the other warpgroup (ping-pong). "
            "A load waits for the stage that it fills. Durations are a model's.",
            "S_{j} 与 O_{j+1} 一同发出；P_{j} 在 O_{j+1} 之下计算（重叠），"
            "也在另一个 warpgroup 的乘积之下计算（乒乓）。\n"
            "装载要等它所填的那一级空出来。时长来自一个模型。",
        ),
        role="soft",
        size=12.5,
    )


PICTURES: Drawings = {
    "hopper_roles": (
        478,
        ("The roles of the Hopper kernel", "Hopper 内核的各个角色"),
        hopper_roles,
    ),
    "hopper_time": (
        376,
        ("A work tile of the Hopper kernel in time", "Hopper 内核的一个 work tile：时间轴"),
        hopper_time,
    ),
}
