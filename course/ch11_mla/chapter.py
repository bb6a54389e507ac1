# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Chapter 11: one latent row a token for all heads, as it is defined and absorbed."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from course.cards import CARDS
from course.device import Array
from course.exercises import function_of
from course.lesson import Counters, Lesson

TITLE = "Multi-head latent attention"
HERE = Path(__file__).parent
HEADS, DIM, LATENT, ROTATED, REQUESTS = 8, 32, 64, 32, 2
SCALE = 1 / math.sqrt(DIM + ROTATED)
SHARED_BYTES = 4 * (HEADS * (LATENT + ROTATED) + 32 * (LATENT + ROTATED + 1))


class Problem(NamedTuple):
    """A step of decoding, in the words of the model."""

    q: Array  # (request, head, dim)
    q_rotated: Array  # (request, head, rotated)
    c: Array  # (request, row, latent)
    r: Array  # (request, row, rotated)
    W_k: Array  # (head, dim, latent)
    W_v: Array  # (head, dim, latent)


def problem(lesson: Lesson, rows: int) -> Problem:
    """Drawn numbers, float32."""
    return Problem(
        lesson.draw(REQUESTS, HEADS, DIM), lesson.draw(REQUESTS, HEADS, ROTATED),
        lesson.draw(REQUESTS, rows, LATENT), lesson.draw(REQUESTS, rows, ROTATED),
        lesson.draw(HEADS, DIM, LATENT) / 8, lesson.draw(HEADS, DIM, LATENT) / 8,
    )  # fmt: skip


def as_defined(x: Problem) -> Array:
    """In float64: every head has keys and values of its own, made from c."""
    q, q_rotated, c, r, W_k, W_v = (a.astype(np.float64) for a in x)
    k = np.einsum("hdl,btl->bhtd", W_k, c)
    v = np.einsum("hdl,btl->bhtd", W_v, c)
    s = np.einsum("bhd,bhtd->bht", q, k) + np.einsum("bhd,btd->bht", q_rotated, r)
    p = np.exp(SCALE * (s - s.max(axis=2, keepdims=True)))
    return np.einsum("bht,bhtd->bhd", p / p.sum(axis=2, keepdims=True), v)


def run(lesson: Lesson) -> None:
    """The absorbed form, counted; then what it is worth at the sizes of DeepSeek-V3."""
    n = 4096 if lesson.on_gpu else 128
    x = problem(lesson, n)
    found, o = attention(lesson, HERE / "mla.cu", x)
    got = np.einsum("hdl,bhl->bhd", x.W_v.astype(np.float64), o)
    truth = as_defined(x)
    error = float(abs(got - truth).max() / abs(truth).max())
    lesson.say(f"W_v o is {error:.1e} from attention with keys and values of each head")
    lesson.require(error < 1e-5, f"the absorbed form is {error:.1e} from the definition")
    row = LATENT + ROTATED
    lesson.head(f"{REQUESTS} requests of {n} tokens, {HEADS} heads")
    lesson.compare("bytes of the cache, each once", found.loaded("cache"), 4 * REQUESTS * n * row)
    lesson.compare("operations", found.flops, 2 * REQUESTS * n * HEADS * (row + LATENT))
    lesson.compare("bytes written", found.stored(), 4 * REQUESTS * HEADS * LATENT)
    lesson.compare("bank conflicts", found.conflicts, 0)
    _at_full_size(lesson)


def attention(lesson: Lesson, path: Path, x: Problem) -> tuple[Counters, Array]:
    """Runs a kernel with mla.cu's parameters and judges it; returns o of the latent rows."""
    device = lesson.device
    q = np.concatenate([np.einsum("bhd,hdl->bhl", x.q, x.W_k), x.q_rotated], axis=2)
    cache = np.concatenate([x.c, x.r], axis=2)
    o = device.empty("o", (REQUESTS, HEADS, LATENT))
    kernel = device.compile(path, HEADS=HEADS, LATENT=LATENT, ROTATED=ROTATED)
    arrays = device.array("q", q), device.array("cache", cache), o
    attend = partial(kernel.launch, REQUESTS, 128, SHARED_BYTES, *arrays, cache.shape[1],
                     SCALE / math.log(2))  # fmt: skip
    found = lesson.run(attend, clear=(o,))
    lesson.check_attention({"o": o.get()[:, :, None]}, q[:, :, None], cache[:, None],
                           cache[:, None, :, :LATENT], scale=SCALE)  # fmt: skip
    lesson.time("decoding", attend, 0, cache.nbytes)
    return found, o.get()


def _at_full_size(lesson: Lesson) -> None:
    """128 heads of 128, a latent row of 512 and 64, in 16 bits."""
    heads, dim, latent, rotated = 128, 128, 512, 64
    row = latent + rotated
    intensity = 2 * heads * (row + latent) / (2 * row)
    lesson.say()
    lesson.say(f"{heads} heads of {dim}: {2 * heads * dim:,} numbers a token as keys and values, "
               f"{row} as a latent row; {intensity:.0f} operations for each byte")  # fmt: skip
    lesson.plot("operations for each byte that a card can do", [
        (card.name, card.flops / card.bytes_per_second) for card in CARDS
    ])  # fmt: skip


def test_of_absorption(lesson: Lesson, path: Path) -> None:
    """Exercise 1: the same results, and the intensity at sizes that are known."""
    absorbed, expanded = function_of(path, "absorbed"), function_of(path, "expanded")
    intensity = function_of(path, "intensity")
    x = problem(lesson, 20)
    truth = as_defined(x)
    wide = Problem(*(a.astype(np.float64) for a in x))
    for b in range(REQUESTS):
        q = absorbed(wide.q[b], wide.q_rotated[b], wide.W_k)
        s = SCALE * q @ np.concatenate([wide.c[b], wide.r[b]], axis=1).T
        p = np.exp(s - s.max(axis=1, keepdims=True))
        o = expanded(p / p.sum(axis=1, keepdims=True) @ wide.c[b], wide.W_v)
        lesson.require(bool(np.allclose(o, truth[b], rtol=1e-9)), "the outputs are not the same")
    for words, expected in (((128, 512, 64), 241.8), ((16, 512, 64), 30.2), ((1, 64, 0), 2.0)):
        got = intensity(*words)
        lesson.require(abs(got - expected) < 0.1, f"intensity{words} is {got:.1f}, not {expected}")


def test_of_one_read(lesson: Lesson, path: Path) -> None:
    """Exercise 2: the cache is read once."""
    n = 64
    found, _ = attention(lesson, path, problem(lesson, n))
    least = 4 * REQUESTS * n * (LATENT + ROTATED)
    moved = found.loaded("cache")
    lesson.require(moved == least, f"{moved} bytes of the cache were read; it has {least}")


EXERCISES = (test_of_absorption, test_of_one_read)
