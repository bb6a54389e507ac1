# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks and times the Hopper forward against float64, FlashAttention-3 and cuDNN on one GPU.

    python compile.py forward_configs.json BUILD
    nvcc -std=c++20 -O2 -shared -Xcompiler -fPIC -I ../../src forward.cpp -o BUILD/forward.so
    python forward.py check BUILD forward_configs.json                    # error rule, row by row
    python forward.py time BUILD forward_configs.json CELLS.json OUT.jsonl [FA3.so]

CELLS.json: a list of [d, seqlen, causal, [[config name, heads per group], ...]]; 16,384 tokens and
heads * d = 2048 in every cell. Timing: all competitors of a cell in random order, ROUNDS (5)
rounds, 25 ms idle before each visit, 2 warm calls, then MS (10) milliseconds of calls with the L2
flushed before each; the median over rounds of the medians ("burst": the card is power limited, a
fixed order favours whoever follows a slow kernel). TFLOP/s by 4 B H S S d, causal counted half.
"""

import ctypes
import functools
import json
import math
import os
import random
import subprocess
import sys
import time

import torch

START = time.time()
LIMIT_S = float(os.environ.get("LIMIT_S", "500"))


class ForwardCall(ctypes.Structure):
    _fields_ = (
        [(n, ctypes.c_void_p) for n in ["q", "k", "v", "o", "lse", "counter", "stream"]]
        + [
            (n, ctypes.c_int)
            for n in [
                "batch",
                "heads_q",
                "heads_kv",
                "q_len",
                "kv_len",
                "causal",
                "window_left",
                "heads_per_group",
            ]
        ]
        + [("scale", ctypes.c_float), ("num_multiprocessors", ctypes.c_int)]
        + [("num_sequences", ctypes.c_int), ("offsets", ctypes.c_void_p)]
    )


class Kernels:
    """The compiled configurations of BUILD, callable by name."""

    def __init__(self, build, configs):
        self.library = ctypes.CDLL(os.path.join(os.path.abspath(build), "forward.so"))
        torch.zeros(1, device="cuda")  # makes the context current
        self.counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.num_multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self.configs, self.handles = {}, {}
        for name, text in configs.items():
            path = os.path.join(build, name + ".cubin")
            if not os.path.exists(path):
                continue

            self.configs[name] = c = {
                "bf16": int("kFloat16" not in text.get("dtype", "")),
                "d_qk": int(text.get("d_qk", 128)),
                "d_v": int(text.get("d_v", 128)),
                "warpgroups": int(text.get("warpgroups", 2)),
                "kv_rows": int(text.get("kv_rows", 128)),
                "stages": int(text.get("stages", 2)),
                "q_slots": int(text.get("q_slots", 0)),
                "stage_output": int(text.get("stage_output", "true") == "true"),
                "sequences": int(text.get("sequences", "false") == "true"),
                "swizzle": int(text.get("swizzle", "true") == "true"),
                "split_dims": int(text.get("split_dims", "false") == "true"),
            }
            handle = self.library.fulmen_bench_load(path.encode(), name.encode(), *c.values())
            if handle < 0:
                raise SystemExit(f"{name}: cannot be loaded, CUDA error {-handle}")
            self.handles[name] = handle
            c["mask"] = text.get("mask", "kLength").split("k")[-1]

    def prepare(
        self, name, q, k, v, o, lse, causal, window_left=-1, heads_per_group=8, offsets=None
    ):
        """A function that enqueues the call. offsets: of packed sequences, int32."""
        batch, heads_q, q_len, d = q.shape
        call = ForwardCall(
            *[t.data_ptr() for t in (q, k, v, o, lse, self.counter)],
            torch.cuda.current_stream().cuda_stream,
            batch,
            heads_q,
            k.shape[1],
            q_len,
            k.shape[2],
            int(causal),
            window_left,
            heads_per_group,
            d**-0.5,
            self.num_multiprocessors,
            0 if offsets is None else len(offsets) - 1,
            None if offsets is None else offsets.data_ptr(),
        )
        keep = (q, k, v, o, lse, offsets)

        def run(keep=keep):
            code = self.library.fulmen_bench_forward(self.handles[name], ctypes.byref(call))
            if code:
                raise RuntimeError(f"{name}: CUDA error {code}")

        return run


def guarded(run, what):
    """Runs once; ends the program if the GPU does not come back within 5 seconds."""
    run()
    event = torch.cuda.Event()
    event.record()
    begin = time.time()
    while not event.query():
        if time.time() - begin > 5:
            print("HANGS", what, flush=True)
            os._exit(3)
        time.sleep(0.001)


# ---- Reference and the error rule ---------------------------------------------------------------


def visible_mask(q_len, kv_len, causal, window_left):
    position = torch.arange(q_len, device="cuda")[:, None] + (kv_len - q_len)
    key = torch.arange(kv_len, device="cuda")[None]
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device="cuda")
    if causal:
        visible &= key <= position
    if window_left >= 0:
        visible &= key >= position - window_left
    return visible


def attention(q, k, v, visible, plain=False):
    """One head. float64, or with plain=True the 16-bit recipe in float32: (o, lse)."""
    kind = torch.float32 if plain else torch.float64
    s = (q.to(kind) @ k.to(kind).T) * q.shape[-1] ** -0.5
    s.masked_fill_(~visible, -math.inf)
    m = s.amax(-1, keepdim=True)
    m = torch.where(m.isinf(), torch.zeros_like(m), m)
    p = (s - m).exp_()
    total = p.sum(-1, keepdim=True)
    lse = (m + total.log()).squeeze(-1)
    if plain:
        p = p.to(q.dtype).float()
    o = p @ v.to(kind) / torch.where(total == 0, torch.ones_like(total), total)
    return (o.to(q.dtype) if plain else o), lse


def reference(q, k, v, visible):
    """What `violations` compares one head with: o, lse in float64 and the bounds of their rows."""
    ref, ref_lse = attention(q, k, v, visible)
    plain = attention(q, k, v, visible, plain=True)[0]
    bound_a = attention(q, k, v.abs(), visible)[0].amax(-1)
    err_plain = (plain.double() - ref).abs().amax(-1)
    top = ref.abs().amax(-1).clamp_min(1e-30)
    ulp = torch.exp2(torch.floor(torch.log2(top)) - (7 if q.dtype == torch.bfloat16 else 10))
    bound = 2 * torch.maximum(err_plain, err_plain.median()) + 8 * 2.0**-23 * bound_a + ulp
    scores = (q.double().abs() @ k.double().abs().T) * q.shape[-1] ** -0.5
    return ref, ref_lse, bound, 8 * 2.0**-23 * (scores.amax(-1) + 1)


def violations(out, lse, expected):
    """Rows of one head outside the rule, largest error, share of the bound, the same of lse."""
    ref, ref_lse, bound, bound_lse = expected
    err = (out.double() - ref).abs().amax(-1)
    bad = (~(err <= bound)).sum().item()
    same = lse.double() == ref_lse  # both -inf
    err_lse = torch.where(same, torch.zeros_like(ref_lse), (lse.double() - ref_lse).abs())
    bad += (~(err_lse <= bound_lse)).sum().item()
    share_lse = torch.where(same, torch.zeros_like(ref_lse), err_lse / bound_lse).max().item()
    return bad, err.max().item(), (err / bound).max().item(), err_lse.max().item(), share_lse


SHAPES = [  # batch, heads_q, heads_kv, q_len, kv_len, window_left, largest logit shift
    (2, 4, 4, 512, 512, -1, 0),
    (1, 4, 2, 1000, 1000, -1, 0),
    (2, 2, 1, 333, 777, -1, 0),
    (1, 2, 2, 700, 300, -1, 0),
    (1, 2, 2, 1, 129, -1, 0),
    (1, 3, 3, 1537, 1537, -1, 100),
    (1, 1, 1, 4096, 4096, -1, 0),
]


def check(kernels):
    torch.backends.cuda.matmul.allow_tf32 = False
    failures = 0
    for name, c in kernels.configs.items():
        dtype = torch.bfloat16 if c["bf16"] else torch.float16
        causal = c["mask"] != "Length"
        worst = [0, 0.0, 0.0, 0.0, 0.0]
        for seed, (b, hq, hk, sq, sk, window, shift) in enumerate(SHAPES):
            window_left = sk // 3 if c["mask"] == "Both" else window
            torch.manual_seed(seed)
            q = torch.randn(b, hq, sq, c["d_qk"], device="cuda", dtype=dtype)
            k = torch.randn(b, hk, sk, c["d_qk"], device="cuda", dtype=dtype)
            v = torch.randn(b, hk, sk, c["d_v"], device="cuda", dtype=dtype)
            if shift:  # one early key that late rows love: leaves the range of a fixed shift
                k[:, :, 5] = shift * q[:, :, sq // 2] / c["d_qk"] ** 0.5
            o = torch.full((b, hq, sq, c["d_v"]), math.nan, device="cuda", dtype=dtype)
            lse = torch.full((b, hq, sq), math.nan, device="cuda")
            run = kernels.prepare(name, q, k, v, o, lse, causal, window_left)
            guarded(run, (name, seed))
            first = o.clone()
            visible = visible_mask(sq, sk, causal, window_left)
            for i in range(b):
                for h in range(hq):
                    expected = reference(q[i, h], k[i, h * hk // hq], v[i, h * hk // hq], visible)
                    found = violations(o[i, h], lse[i, h], expected)
                    if found[0]:
                        print(
                            f"  {name}, shape {seed}, head {i} {h}: {found[0]} rows outside,"
                            f" share of the bound {found[2]:.2f}, lse {found[4]:.2f}"
                        )
                    worst = [worst[0] + found[0]] + [
                        max(x, y) for x, y in zip(worst[1:], found[1:])
                    ]
            for _ in range(20):
                run()
            torch.cuda.synchronize()
            if not torch.equal(first.view(torch.int16), o.view(torch.int16)):
                print(name, "shape", seed, "is not the same from run to run")
                failures += 1
        failures += worst[0]
        print(
            f"{name}: rows outside the rule {worst[0]}, max error {worst[1]:.2e}, "
            f"largest share of the bound {worst[2]:.2f}, lse {worst[3]:.1e}",
            flush=True,
        )
    print("failures", failures)
    return failures


# ---- Timing -------------------------------------------------------------------------------------


@functools.cache
def flush_buffer():
    return torch.empty(256 << 18, dtype=torch.int32, device="cuda")


def visit(run, count):
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for begin, end in events:
        flush_buffer().zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)


def burst(runs):
    """{name: (median of medians, all samples)} in milliseconds."""
    rounds, ms = int(os.environ.get("ROUNDS", "5")), float(os.environ.get("MS", "10"))
    estimate, medians, samples = {}, {n: [] for n in runs}, {n: [] for n in runs}
    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
        estimate[name] = max(1e-3, visit(run, 3)[1])
    order, generator = list(runs), random.Random(1)
    for _ in range(rounds):
        generator.shuffle(order)
        for name in order:
            time.sleep(0.025)
            runs[name]()
            runs[name]()
            times = visit(runs[name], max(3, min(41, int(ms / estimate[name]) | 1)))
            medians[name].append(times[len(times) // 2])
            samples[name] += times
    return {n: (sorted(m)[len(m) // 2], sorted(samples[n])) for n, m in medians.items()}


@functools.cache
def heat_matrices():
    return [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def sustained(run, estimate_ms):
    """Milliseconds a call, 0.45 s back to back, after 0.4 s of matrix products: a hot card."""
    a, b, product = heat_matrices()
    for _ in range(280):
        torch.mm(a, b, out=product)
    for _ in range(max(1, int(150 / estimate_ms))):
        run()
    count = max(2, int(450 / estimate_ms))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def load_fa3(path):
    cudart = os.path.join(os.path.dirname(path), "..", "lib", "libcudart.so.12")
    if os.path.exists(cudart):
        ctypes.CDLL(cudart, mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(path)
    return torch.ops.flash_attn_x


def clock_mhz():
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    return int(subprocess.check_output(query).split()[0])


def time_cell(kernels, cell, out, fa3):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    versions = f"torch {torch.__version__}, cudnn {torch.backends.cudnn.version()}"
    d, s, causal, names = cell
    heads, batch = 2048 // d, 16384 // s
    torch.manual_seed(s + d)
    q, k, v = (
        torch.randn(batch, heads, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    flops = 4 * batch * heads * s * s * d / (2 if causal else 1)
    runs, errors, outside = {}, {}, {}
    o, lse = torch.empty_like(q), torch.empty(batch, heads, s, device="cuda")
    picks = {(0, 0), (batch - 1, heads - 1), (batch // 2, heads // 3)}
    visible = visible_mask(s, s, causal, -1)
    torch.backends.cuda.matmul.allow_tf32 = False
    if s > 8192:
        picks = {(batch - 1, heads - 1)}
    expected = {(i, h): reference(q[i, h], k[i, h], v[i, h], visible) for i, h in picks}
    del visible

    def judge(name, x):
        found = [violations(x[i, h], lse[i, h], e) for (i, h), e in expected.items()]
        errors[name] = max(f[1] for f in found)
        outside[name] = sum(f[0] for f in found)

    for name, group in names:
        if name not in kernels.handles:
            print("missing", name)
            continue
        run = kernels.prepare(name, q, k, v, o, lse, causal, -1, group)
        key = f"{name}/{group}"
        o.fill_(math.nan)
        lse.fill_(math.nan)
        guarded(run, (d, s, causal, key))
        judge(key, o)
        if outside[key]:
            print("OUTSIDE THE RULE", d, s, causal, key, outside[key], errors[key], flush=True)
        runs[key] = run
    if fa3 is not None:
        t = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        runs["fa3"] = lambda t=t: fa3.fwd(
            *t,
            softmax_scale=d**-0.5,
            is_causal=bool(causal),
            window_size_left=-1,
            window_size_right=-1,
            num_splits=1,
        )[0]
        judge("fa3", runs["fa3"]().transpose(1, 2))

    def cudnn(q=q, k=k, v=v, causal=causal):
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return sdpa(q, k, v, is_causal=bool(causal))

    runs["cudnn"] = cudnn
    judge("cudnn", cudnn())
    times = burst(runs)
    clock = clock_mhz()
    measured = [("burst", name, *t) for name, t in times.items()]
    if s == 16384 and "SUSTAINED" in os.environ:
        order = list(runs)
        random.Random(2).shuffle(order)
        for name in order:
            measured.append(("sustained", name, sustained(runs[name], times[name][0]), None))
    line = []
    for case, name, p50, samples in measured:
        tflops = flops / p50 / 1e9
        line.append((tflops, name if case == "burst" else name + " sustained"))
        record = {
            "grid": "forward",
            "op": "forward",
            "who": "fulmen" if "/" in name else name,
            "implementation": "sm90 " + name if "/" in name else name,
            "dtype": "bf16",
            "batch": batch,
            "heads_q": heads,
            "heads_kv": heads,
            "seqlen_q": s,
            "seqlen_kv": s,
            "d_qk": d,
            "d_v": d,
            "causal": bool(causal),
            "case": case,
            "p50_ms": round(p50, 5),
            "p99_ms": samples
            and round(samples[min(len(samples) - 1, int(len(samples) * 0.99))], 5),
            "tflops": round(tflops, 1),
            "gbps": round(4 * q.numel() * 2 / p50 / 1e6, 1),
            "peak_mib": None,
            "max_error": errors[name],
            "card": torch.cuda.get_device_name(),
            "clock_mhz": clock,
            "versions": versions,
            "commit": None,
        }
        out.write(json.dumps(record) + "\n")
    out.flush()
    line.sort(reverse=True)
    print(
        f"d{d} s{s} {'causal' if causal else 'full'}:",
        " ".join(f"{n} {t:.0f}" for t, n in line),
        f"{time.time() - START:.0f}s",
        flush=True,
    )


def main():
    mode, build, configs_file = sys.argv[1:4]
    with open(configs_file, encoding="utf-8") as file:
        kernels = Kernels(build, json.load(file))
    if mode == "check":
        return 1 if check(kernels) else 0
    with open(sys.argv[4], encoding="utf-8") as file:
        cells = json.load(file)
    if mode == "once":  # for a profiler: one call of every cell
        for d, s, causal, names in cells:
            q, k, v = (
                torch.randn(16384 // s, 2048 // d, s, d, device="cuda", dtype=torch.bfloat16)
                for _ in range(3)
            )
            lse = torch.empty(q.shape[:3], device="cuda")
            guarded(
                kernels.prepare(
                    names[0][0], q, k, v, torch.empty_like(q), lse, causal, -1, names[0][1]
                ),
                names,
            )
        return 0
    fa3 = load_fa3(sys.argv[6]) if len(sys.argv) > 6 else None
    with open(sys.argv[5], "w", encoding="utf-8") as out:
        for cell in cells:
            if time.time() - START > LIMIT_S:
                print("out of time")
                break
            time_cell(kernels, cell, out, fa3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
