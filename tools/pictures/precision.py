# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Bits of float32 in two parts of 11, and the products that are made of them."""

from __future__ import annotations

import math

import numpy as np
from canvas import Box, Drawings, Picture

X, Y = math.pi, math.e


def upper(x: float) -> float:
    """The nearest number of 11 significant bits, as tf32 has them."""
    exponent = math.floor(math.log2(abs(x)))
    return round(x / 2.0 ** (exponent - 10)) * 2.0 ** (exponent - 10)


def _bits(x: float) -> str:
    return f"{int(np.float32(x).view(np.uint32)):032b}"


def three_products(p: Picture) -> None:
    """A number of float32 is two numbers of tf32, all but exactly."""
    x, y = float(np.float32(X)), float(np.float32(Y))
    big_x, big_y = upper(x), upper(y)
    small_x, small_y = upper(x - big_x), upper(y - big_y)
    left, pitch = 150, 16.6
    for row, (name, value, kept) in enumerate(
        [("x", x, 23), ("X", big_x, 10), ("x'", small_x, 10)]
    ):
        top = 58 + row * 50
        p.text((30, top + 16), name, bold=True, size=15)
        p.text((54, top + 16), f"{value:.7g}", size=12.5, role="soft")
        for place, bit in enumerate(_bits(value)):
            role = "o" if place == 0 else "k" if place < 9 else "q"
            cell = Box(left + place * pitch, top, pitch - 2, 22)
            if place < 9 + kept:
                p.box(cell, role, radius=3)
                p.text((cell.middle[0], top + 16), bit, size=12, role=role, anchor="middle")
            else:
                p.bar(cell, "faint")
    for words, first, count in [
        (p.say("exponent", "指数"), 1, 8),
        (p.say("significand", "尾数"), 9, 23),
    ]:
        p.text((left + (first + count / 2) * pitch, 44), words, role="soft", anchor="middle")
    p.text(
        (30, 226),
        p.say(
            "X has the 11 upper bits of x, rounded; x' the next 11, with an exponent of its own.",
            "X 是 x 的高 11 位（舍入）；x' 是接下来的 11 位，有自己的指数。",
        ),
    )
    one = big_x * big_y
    three = one + big_x * small_y + small_x * big_y
    rows = [
        ("tf32", "X Y", one, "hot"),
        ("3xtf32", "X Y + X y' + x' Y", three, "v"),
    ]
    for number, (name, product, value, role) in enumerate(rows):
        at = Box(30, 250 + number * 54, 660, 44)
        p.box(at, role)
        p.text((46, at.y + 28), name, role=role, bold=True)
        p.text((130, at.y + 28), product, role=role, size=14)
        error = abs(value - x * y) / (x * y)
        said = p.say(
            "relative error of one product: 2^{{{:.1f}}}", "一次乘积的相对误差：2^{{{:.1f}}}"
        )
        p.text((674, at.y + 28), said.format(math.log2(error)), role=role, anchor="end")
    p.text(
        (30, 380),
        p.say(
            "For x = pi and y = e. The fourth product, x' y', is left out: at most 2^{-22} of x y.",
            "x = pi，y = e。略去第四个乘积 x' y'：至多是 x y 的 2^{-22}。",
        ),
        role="soft",
    )


PICTURES: Drawings = {
    "three_products": (
        398,
        ("A float32 number as two of tf32", "一个 float32 数写成两个 tf32 数"),
        three_products,
    ),
}
