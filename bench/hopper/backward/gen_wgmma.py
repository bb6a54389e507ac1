# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Writes wgmma.h: one wrapper per N, A from shared memory (ss) or registers (rs), bf16 in, f32 out.

Descriptors travel as their low 32 bits (address and leading offset); the high word (stride 1024
bytes, 128-byte swizzle) is a constant inside the asm. The template argument is the transpose bit
of B.
"""

from pathlib import Path

out = ["#pragma once", "#include <cstdint>"]
for n in (64, 128):
    r = n // 2
    regs = ", ".join(f"%{i}" for i in range(r))
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(r))
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
    head = "template <int tB> __device__ __forceinline__ void"
    high = "mov.b32 h, 0x40000040;"
    out += [
        f"{head} wgmma_ss(float (&d)[{r}], uint32_t a, uint32_t b, int acc) {{",
        '  asm volatile("{.reg .pred p; .reg .b32 h; .reg .b64 da, db; "',
        f'   "setp.ne.b32 p, %{r + 2}, 0; {high} mov.b64 da, {{%{r}, h}}; "',
        f'   "mov.b64 db, {{%{r + 1}, h}};\\n"',
        f'   "{name} {{{regs}}}, da, db, p, 1, 1, 0, %{r + 3};}}"',
        f'   : {outs} : "r"(a), "r"(b), "r"(acc), "n"(tB));',
        "}",
        f"{head} wgmma_rs(float (&d)[{r}], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,",
        "    uint32_t b, int acc) {",
        '  asm volatile("{.reg .pred p; .reg .b32 h; .reg .b64 db; "',
        f'   "setp.ne.b32 p, %{r + 5}, 0; {high} mov.b64 db, {{%{r + 4}, h}};\\n"',
        f'   "{name} {{{regs}}}, {{%{r}, %{r + 1}, %{r + 2}, %{r + 3}}}, db, p, 1, 1, "',
        f'   "%{r + 6};}}"',
        f'   : {outs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(acc), "n"(tB));',
        "}",
    ]
Path("wgmma.h").write_text("\n".join(out) + "\n")
