# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks and times the Hopper backward against float64, FlashAttention-3 and cuDNN on one GPU.

    g++ -std=c++20 -O2 -shared -fPIC -I INCLUDE -o library.so library.cpp -L BUILD -lfulmen
    python backward.py check library.so                     # the error rule, row by row
    python backward.py options library.so                    # the same: groups, windows, alignments
    python backward.py sequences library.so                  # the same: packed, lengths
    python backward.py same library.so                       # deterministic: 200 times alike
    python backward.py time library.so OUT.jsonl [NAME=OTHER.so ...] [FA3=LIBRARY.so]

A library named deterministic (a copy of library.so, since plans are kept) is called so. DIMS, SEQS,
ROUNDS and LIMIT_S choose cells.

16,384 tokens and heads * d = 2048 in every cell; prepare and the rounding of dQ are inside the
time. Timing: all competitors of a cell in random order, ROUNDS (5) rounds, 25 ms idle before each
visit, 2 warm calls, then 10 ms of calls with the L2 flushed before each; the median over rounds of
the medians ("burst": the card is power limited, a fixed order favours whoever follows a slow
kernel). TFLOP/s by 10 B H S S d, causal counted half.
"""

import ctypes
import json
import math
import os
import random
import subprocess
import sys
import time

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch.nn.attention import SDPBackend, sdpa_kernel

LIMIT_S = float(os.environ.get("LIMIT_S", "300"))
START = time.time()


class Library:
    def __init__(self, path):
        self.library = ctypes.CDLL(os.path.abspath(path))
        self.old = not hasattr(self.library, "backward_workspace_of")  # of the first experiments
        size = "backward_workspace" if self.old else "backward_workspace_of"
        getattr(self.library, size).restype = ctypes.c_size_t

    def prepare(self, q, k, v, o, do, lse, causal, heads_per_group, poison=False):
        """A function that enqueues the call and returns dq, dk, dv; and the workspace in bytes."""
        heads, seq, d = q.shape
        shape = (ctypes.c_int * 10)(d, int(causal), 1, heads, heads, seq, seq, 0, 0,
                                    heads_per_group)  # fmt: skip
        size = (self.library.backward_workspace(d, heads, seq, heads_per_group) if self.old
                else self.library.backward_workspace_of(shape))  # fmt: skip
        work = torch.empty(size, dtype=torch.uint8, device="cuda")
        out = [torch.empty_like(q) for _ in range(3)]
        if poison:
            work.fill_(255)
            for x in out:
                x.fill_(math.nan)
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, o, do, lse, *out, work)]
        keep = (q, k, v, o, do, lse, work)

        def run(keep=keep):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            code = (
                self.library.backward_run(d, int(causal), *pointers, heads, seq, heads_per_group,
                                          stream)
                if self.old
                else self.library.backward_run_of(shape, *pointers, stream)
            )  # fmt: skip
            if code:
                raise RuntimeError(f"CUDA error {code}")
            return out

        return run, size


def guarded(run, what):
    """Runs once; ends the program if the GPU does not come back within 5 seconds."""
    result = run()
    event = torch.cuda.Event()
    event.record()
    begin = time.time()
    while not event.query():
        if time.time() - begin > 5:
            print("HANGS", what, flush=True)
            os._exit(3)
        time.sleep(0.001)
    return result


# ---- Reference and the error rule ---------------------------------------------------------------


def forward(q, k, v, seen, kind, rounded):
    """P, O and lse of some heads in `kind`; seen: True where causal, or a mask; rounded: the 16-bit
    recipe."""
    r = (lambda x: x.to(q.dtype).to(kind)) if rounded else (lambda x: x)
    s = q.shape[-1] ** -0.5 * (q.to(kind) @ k.to(kind).transpose(1, 2))
    if seen is True:
        seq = q.shape[1]
        seen = torch.ones(seq, seq, dtype=torch.bool, device="cuda").tril()
    if seen is not False:
        s.masked_fill_(~seen, -math.inf)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m.clamp_min(-1e300 if kind == torch.float64 else -1e30))
    total = e.sum(-1, keepdim=True)
    some = total.where(total > 0, 1)
    return e / some, r((r(e) @ v.to(kind)) / some), (m + some.log()).squeeze(-1)


def gradients(q, k, v, do, p, o, kind, rounded, group=1):
    """dq, dk, dv and their A of the error rule; dk, dv summed over groups of heads."""

    def add(x):
        return x if group == 1 else x.unflatten(0, (-1, group)).sum(1)

    dtype = q.dtype
    r = (lambda x: x.to(dtype).to(kind)) if rounded else (lambda x: x)
    q, k, v, do = (x.to(kind) for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    delta = (do * o).sum(-1, keepdim=True)
    dp = do @ v.transpose(1, 2)
    ds = r(p * (dp - delta))
    grads = (r(scale * (ds @ k)), r(scale * add(ds.transpose(1, 2) @ q)),
             r(add(r(p).transpose(1, 2) @ do)))  # fmt: skip
    if rounded:
        return grads, None
    a = p * (dp.abs() + delta.abs())
    bounds = (scale * (a @ k.abs()), scale * add(a.transpose(1, 2) @ q.abs()))
    return grads, (*bounds, add(p.transpose(1, 2) @ do.abs()))


def judge(found, ref, plain, bound_a, worst, i):
    """How many rows break the error rule; worst[i]: the largest share of the bound so far."""
    err = (found.double() - ref).abs().amax(-1)
    err_plain = (plain.double() - ref).abs().amax(-1)
    top = ref.abs().amax(-1).clamp_min(1e-30)
    typical = err_plain.median(-1, keepdim=True).values
    bound = 2 * torch.maximum(err_plain, typical)
    bound += 8 * 2.0**-23 * bound_a.amax(-1)
    bound += torch.exp2(torch.floor(torch.log2(top)) - 7)
    worst[i] = max(worst[i], (err / bound).nan_to_num(1e9).max().item())
    return (~(err <= bound)).sum().item()


OPTIONS = [  # mask (0, causal 1, window 2), batch, heads_q, heads_kv, q_len, kv_len, left, top_left
    (0, 2, 8, 2, 300, 500, 0, 0),
    (0, 1, 6, 6, 1, 1000, 0, 0),
    (1, 2, 8, 2, 1000, 1000, 0, 0),
    (1, 3, 4, 1, 333, 777, 0, 0),
    (1, 2, 4, 4, 777, 333, 0, 0),
    (1, 2, 4, 2, 500, 900, 0, 1),
    (1, 1, 32, 8, 2048, 2048, 0, 0),
    (2, 2, 8, 4, 1500, 1500, 200, 0),
    (2, 1, 4, 4, 700, 1300, 64, 0),
]


def visible_pairs(mask, q_len, kv_len, left, top_left):
    position = torch.arange(q_len, device="cuda")[:, None] + (0 if top_left else kv_len - q_len)
    key = torch.arange(kv_len, device="cuda")[None]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device="cuda")
    if mask > 0:
        seen &= key <= position
    if mask == 2:
        seen &= key >= position - left
    return seen


def check_options(library):
    torch.backends.cuda.matmul.allow_tf32 = False
    failures = 0
    for d in (64, 128):
        for case in OPTIONS:
            mask, batch, heads_q, heads_kv, q_len, kv_len, left, top_left = case
            torch.manual_seed(q_len + kv_len)
            q, do = (torch.randn(batch, heads_q, q_len, d, device="cuda").bfloat16() for _ in "qo")
            k, v = (torch.randn(batch, heads_kv, kv_len, d, device="cuda").bfloat16() for _ in "kv")
            seen = visible_pairs(mask, q_len, kv_len, left, top_left)
            group = heads_q // heads_kv
            flat_q, flat_do = (x.flatten(0, 1) for x in (q, do))
            wide_k, wide_v = (x.repeat_interleave(group, 1).flatten(0, 1) for x in (k, v))
            _, o, lse = forward(flat_q, wide_k, wide_v, seen, torch.float32, True)
            o, lse = o.bfloat16().contiguous(), lse.contiguous()
            shape = (ctypes.c_int * 10)(d, mask, *case[1:6], left, top_left, 8 if mask else 1)
            size = library.library.backward_workspace_of(shape)
            work = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
            out = [torch.full_like(x, math.nan) for x in (q, k, v)]
            pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, o, do, lse, *out, work)]

            def run(shape=shape, pointers=pointers, out=out):
                stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                code = library.library.backward_run_of(shape, *pointers, stream)
                if code:
                    raise RuntimeError(f"CUDA error {code}")
                return out

            what = f"d {d} case {case}"
            args = flat_q, wide_k, wide_v
            p, o64, _ = forward(*args, seen, torch.float64, False)
            ref, bound_a = gradients(*args, flat_do, p, o64, torch.float64, False, group)
            p, o32, _ = forward(*args, seen, torch.float32, True)
            plain, _ = gradients(*args, flat_do, p, o32, torch.float32, True, group)
            worst, bad = [0.0, 0.0, 0.0], 0
            for _ in range(2):
                for i, x in enumerate(guarded(run, what)):
                    bad += judge(x.flatten(0, 1), ref[i], plain[i], bound_a[i], worst, i)
            failures += bad > 0
            shares = " ".join(f"{n} {x:.2f}" for n, x in zip(("dq", "dk", "dv"), worst))
            print(f"{'ok  ' if not bad else 'FAIL'} {what}: share of the bound: {shares}",
                  flush=True)  # fmt: skip
    print("failures:", failures)
    return failures


def check_sequences(library):
    """Packed sequences and lengths; rows of nobody are NaN."""
    torch.backends.cuda.matmul.allow_tf32 = False
    failures = 0
    lengths = [(700, 700), (1, 300), (0, 0), (513, 90), (300, 1000), (128, 256)]
    for d in (64, 128):
        for packed in (True, False):
            for mask in (0, 1):
                torch.manual_seed(d)
                batch, heads, most = len(lengths), 1 if packed else 3, 1000
                begins = [
                    [sum(x[i] for x in lengths[:n]) for n in range(batch + 1)] for i in (0, 1)
                ]
                numbers = begins if packed else [[x[i] for x in lengths] for i in (0, 1)]
                index = [torch.tensor(n, dtype=torch.int32, device="cuda") for n in numbers]
                whole = (batch, heads, most, d)
                q, k, v, o, do = (torch.full(whole, math.nan, device="cuda").bfloat16()
                                  for _ in range(5))  # fmt: skip
                lse = torch.full(whole[:3], math.nan, device="cuda")
                out = [torch.full_like(q, math.nan) for _ in range(3)]

                def rows(x, n, i, packed=packed, begins=begins):
                    if packed:
                        return x.flatten(0, 2)[None, begins[i][n] : begins[i][n + 1]]
                    return x[n, :, : lengths[n][i]]

                for n, (q_len, kv_len) in enumerate(lengths):
                    for x, i in ((q, 0), (do, 0), (k, 1), (v, 1)):
                        rows(x, n, i).normal_()
                    if min(q_len, kv_len) == 0:
                        continue
                    seen = visible_pairs(mask, q_len, kv_len, 0, 0)
                    args = rows(q, n, 0), rows(k, n, 1), rows(v, n, 1)
                    _, o32, l32 = forward(*args, seen, torch.float32, True)
                    rows(o, n, 0).copy_(o32.bfloat16())
                    (lse.flatten()[None, begins[0][n] : begins[0][n + 1]] if packed
                     else lse[n, :, :q_len]).copy_(l32)  # fmt: skip
                shape = (ctypes.c_int * 10)(d, mask, batch, heads, heads, most, most, 0, 0,
                                            2 if packed else 3)  # fmt: skip
                library.library.backward_set_sequences(
                    int(packed), *(ctypes.c_void_p(x.data_ptr()) for x in index)
                )
                size = library.library.backward_workspace_of(shape)
                work = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
                pointers = [
                    ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, o, do, lse, *out, work)
                ]

                def run(shape=shape, pointers=pointers, out=out):
                    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                    if library.library.backward_run_of(shape, *pointers, stream):
                        raise RuntimeError("the call failed")
                    return out

                what = f"d {d} {'packed' if packed else 'lengths'} mask {mask}"
                found, worst, bad = guarded(run, what), [0.0, 0.0, 0.0], 0
                for n, (q_len, kv_len) in enumerate(lengths):
                    if min(q_len, kv_len) > 0:
                        seen = visible_pairs(mask, q_len, kv_len, 0, 0)
                        args = rows(q, n, 0), rows(k, n, 1), rows(v, n, 1)
                        p, o64, _ = forward(*args, seen, torch.float64, False)
                        ref, a = gradients(*args, rows(do, n, 0), p, o64, torch.float64, False)
                        p, o32, _ = forward(*args, seen, torch.float32, True)
                        plain, _ = gradients(*args, rows(do, n, 0), p, o32, torch.float32, True)
                        for i in range(3):
                            got = rows(found[i], n, min(i, 1))
                            bad += judge(got, ref[i], plain[i], a[i], worst, i)
                    for i in range(3):
                        rows(found[i], n, min(i, 1)).zero_()
                bad += sum(x.count_nonzero().item() for x in found)
                failures += bad > 0
                shares = " ".join(f"{n} {x:.2f}" for n, x in zip(("dq", "dk", "dv"), worst))
                print(f"{'ok  ' if not bad else 'FAIL'} {what}: share of the bound: {shares}",
                      flush=True)  # fmt: skip
    library.library.backward_set_sequences(0, None, None)
    print("failures:", failures)
    return failures


def check_same(library):
    """Deterministic calls: all bits alike in 200 runs."""
    library.library.backward_set_deterministic(1)
    failures = 0
    for d, causal in ((64, False), (64, True), (128, False), (128, True), (256, True)):
        q, k, v, do, o = (torch.randn(40, 1000, d, device="cuda").bfloat16() for _ in range(5))
        lse = torch.randn(40, 1000, device="cuda") + 6
        run, _ = library.prepare(q, k, v, o, do, lse, causal, 1, poison=True)
        first = [x.clone() for x in guarded(run, f"d {d}")]
        differ = sum(
            any(not torch.equal(a.view(torch.int16), b.view(torch.int16))
                for a, b in zip(first, run()))
            for _ in range(200)
        )  # fmt: skip
        failures += differ > 0
        print(f"{'FAIL' if differ else 'ok  '} d {d} causal {int(causal)}: {differ} of 200 differ",
              flush=True)  # fmt: skip
    return failures


CASES = [  # heads, seq
    (1024, 512),
    (200, 512),
    (150, 1024),
    (40, 128),
    (9, 2048),
    (60, 1000),
    (30, 333),
    (5, 1),
]


def check(library):
    torch.backends.cuda.matmul.allow_tf32 = False
    failures = 0
    for d in (64, 128):
        for causal in (False, True):
            for heads, seq in CASES:
                torch.manual_seed(heads + seq)
                q, k, v, do = (
                    torch.randn(heads, seq, d, device="cuda").bfloat16() for _ in range(4)
                )
                worst, bad = [0.0, 0.0, 0.0], 0
                o, lse = torch.empty_like(q), torch.empty(heads, seq, device="cuda")
                part = max(1, min(heads, 64 * 2**20 // (seq * seq)))
                parts = [slice(i, min(i + part, heads)) for i in range(0, heads, part)]
                for x in parts:
                    _, o32, l32 = forward(q[x], k[x], v[x], causal, torch.float32, True)
                    o[x], lse[x] = o32.bfloat16(), l32
                group = 8 if causal else 1
                run, _ = library.prepare(q, k, v, o, do, lse, causal, group, poison=True)
                what = f"d {d} causal {int(causal)} heads {heads} seq {seq}"
                for repeat in range(3):
                    found = guarded(run, what)
                    if repeat == 1:
                        continue
                    for x in parts:
                        args = q[x], k[x], v[x]
                        p, o64, _ = forward(*args, causal, torch.float64, False)
                        ref, bound_a = gradients(*args, do[x], p, o64, torch.float64, False)
                        p, o32, _ = forward(*args, causal, torch.float32, True)
                        plain, _ = gradients(*args, do[x], p, o32, torch.float32, True)
                        for i in range(3):
                            bad += judge(found[i][x], ref[i], plain[i], bound_a[i], worst, i)
                failures += bad > 0
                shares = " ".join(f"{n} {x:.2f}" for n, x in zip(("dq", "dk", "dv"), worst))
                print(f"{'ok  ' if not bad else 'FAIL'} {what}: share of the bound: {shares}",
                      flush=True)  # fmt: skip
    print("failures:", failures)
    return failures


# ---- Timing -------------------------------------------------------------------------------------

_flush = []


def visit(run, calls):
    if not _flush:
        _flush.append(torch.empty(1 << 26, dtype=torch.int32, device="cuda"))
    pairs = []
    for _ in range(calls):
        _flush[0].zero_()
        pairs.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        pairs[-1][0].record()
        run()
        pairs[-1][1].record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairs)


def burst(runs, rounds):
    """{name: run} -> {name: (median of the rounds' medians, 99th percentile of all), ms}."""
    estimate = {}
    for name, run in runs.items():
        guarded(run, name)
        estimate[name] = max(1e-3, visit(run, 3)[1])
    medians, samples, names = {n: [] for n in runs}, {n: [] for n in runs}, list(runs)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            time.sleep(0.025)
            runs[name](), runs[name]()
            times = visit(runs[name], max(3, min(41, int(10 / estimate[name]) | 1)))
            medians[name].append(times[len(times) // 2])
            samples[name] += times

    def at(share, values):
        return sorted(values)[min(len(values) - 1, int(len(values) * share))]

    return {n: (at(0.5, medians[n]), at(0.99, samples[n])) for n in runs}


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def cell(d, causal, seq, libraries, fa3, rounds, tag):
    batch, heads = 16384 // seq, 2048 // d
    q, k, v, do = (torch.randn(batch, seq, heads, d, device="cuda").bfloat16() for _ in range(4))

    def flat(x):
        return x.transpose(1, 2).contiguous().view(batch * heads, seq, d)

    q4, k4, v4, do4 = (flat(x).view(batch, heads, seq, d).requires_grad_() for x in (q, k, v, do))
    do4.requires_grad_(False)
    runs = {}
    try:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            oc = F.scaled_dot_product_attention(q4, k4, v4, is_causal=causal)
            runs["cudnn"] = lambda: torch.autograd.grad(oc, (q4, k4, v4), do4, retain_graph=True)
            runs["cudnn"]()
    except RuntimeError as error:  # no such head dimension
        if not fa3:
            raise
        runs = {}
        print("cudnn:", str(error)[:80])
    if fa3:
        o4, lse4 = fa3.fwd(q, k, v, softmax_scale=d**-0.5, is_causal=causal, window_size_left=-1,
                         window_size_right=-1, num_splits=1)[:2]  # fmt: skip

        def run_fa3():
            dq, dk, dv = (torch.empty_like(q) for _ in range(3))
            fa3.bwd(do, q, k, v, o4, lse4, dq, dk, dv, None, None, None, None, None, None,
                    d**-0.5, causal, -1, -1, 0.0, False, 0)  # fmt: skip
            return dq, dk, dv

        runs["fa3"] = run_fa3
        o, lse = flat(o4), lse4.contiguous().view(batch * heads, seq)
    else:
        o = oc.detach().reshape(batch * heads, seq, d)
        ln = [forward(*(x.detach().view(-1, seq, d)[i : i + 1] for x in (q4, k4, v4)), causal,
                      torch.float32, True)[2] for i in range(batch * heads)]  # fmt: skip
        lse = torch.cat(ln).contiguous()
    expected = ([x.reshape(batch * heads, seq, d) for x in runs["cudnn"]()] if "cudnn" in runs
                else [flat(x) for x in runs["fa3"]()])  # fmt: skip
    errors, peaks = {}, {}
    for name, library in libraries.items():
        args = [x.detach().view(batch * heads, seq, d) for x in (q4, k4, v4)]
        run, size = library.prepare(*args, o, do4.view(batch * heads, seq, d), lse, causal,
                                    8 if causal else 1, poison=True)  # fmt: skip
        found = guarded(run, f"{name} d {d} causal {causal} seq {seq}")
        errors[name] = max(relative(a, b) for a, b in zip(found, expected))
        peaks[name] = size / 2**20
        runs[name] = run
    if fa3:
        errors["fa3"] = max(relative(flat(a), b) for a, b in zip(runs["fa3"](), expected))
    times = burst(runs, rounds)
    flops = 10 * batch * heads * seq * seq * d / (2 if causal else 1)
    rows, line = [], f"d {d:3d} {'causal' if causal else 'full  '} {seq:5d}:"
    for name, (p50, p99) in times.items():
        rows.append(
            dict(grid="backward", op="backward", who="fulmen" if name in libraries else name,
                 implementation=name, dtype="bf16", batch=batch, heads_q=heads, heads_kv=heads,
                 seqlen_q=seq, seqlen_kv=seq, d_qk=d, d_v=d, causal=causal, case="burst",
                 p50_ms=round(p50, 5), p99_ms=round(p99, 5), tflops=round(flops / p50 / 1e9, 1),
                 gbps=None, peak_mib=round(peaks[name], 1) if name in peaks else None,
                 max_error=None, **tag)
        )  # fmt: skip
        line += f" {name} {flops / p50 / 1e9:.0f}"
    bad = {n: f"{x:.1e}" for n, x in errors.items() if not x < 8e-3}
    print(line, f"DISAGREES with cuDNN: {bad}" if bad else "", flush=True)
    return rows


def smi(query):
    run = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
                         capture_output=True, text=True, check=False)  # fmt: skip
    return run.stdout.strip()


def main():
    mode, path = sys.argv[1:3]
    modes = {"check": check, "options": check_options, "sequences": check_sequences,
             "same": check_same}  # fmt: skip
    if mode in modes:
        sys.exit(1 if modes[mode](Library(path)) else 0)
    libraries, fa3 = {"backward": Library(path)}, None
    for extra in sys.argv[4:]:
        name, other = extra.split("=")
        if name == "FA3":
            torch.ops.load_library(other)
            fa3 = getattr(torch.ops, os.environ.get("FA3_NAMESPACE", "flash_attn_3"))
        else:
            libraries[name] = Library(other)
            if name == "deterministic":
                libraries[name].library.backward_set_deterministic(1)
    versions = (f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
                        f"driver {smi('driver_version')}")  # fmt: skip
    tag = {
        "card": torch.cuda.get_device_name(),
        "clock_mhz": None,
        "commit": None,
        "versions": versions,
    }
    with open(sys.argv[3], "w") as out:
        for seq in map(int, os.environ.get("SEQS", "512 1024 2048 4096 8192 16384").split()):
            for d in map(int, os.environ.get("DIMS", "64 128").split()):
                for causal in (False, True):
                    if time.time() - START > LIMIT_S:
                        continue
                    rounds = int(os.environ.get("ROUNDS", "5"))
                    for row in cell(d, causal, seq, libraries, fa3, rounds, tag):
                        out.write(json.dumps(row) + "\n")
                    out.flush()
    os._exit(0)


main()
