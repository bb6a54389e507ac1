# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""How long the first calls of a process take through Python, on PyTorch tensors: host.py runs it.

Says a JSON object a line, as host.cpp does: the import of fulmen, then the first and the second
forward call, each until its result is there. PyTorch is imported and has used the GPU before.
"""

import json
import time

import torch

x = torch.ones(1, 8, 512, 64, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
times = {}

start = time.perf_counter()
import fulmen  # noqa: E402  what is measured

times["import of fulmen"] = time.perf_counter() - start
for which in ("first", "second"):
    start = time.perf_counter()
    fulmen.attention(x, x, x, causal=True)
    torch.cuda.synchronize()
    times[f"{which} call of a process, Python on torch tensors"] = time.perf_counter() - start

implementation = fulmen.explain(x, x, x, causal=True)["implementation"]
about = {"op": "forward", "implementation": implementation, "dtype": "bfloat16"}
for case, seconds in times.items():
    print(json.dumps({"case": case, **about, "p50_us": seconds * 1e6}))
