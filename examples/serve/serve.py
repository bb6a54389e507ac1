# SPDX-FileCopyrightText: fulmen contributors
# SPDX-License-Identifier: Apache-2.0
"""Trains a small character model and serves it: continuous batching over a cache in pages.

python examples/serve/serve.py                            # a few prompts, and a load test
python examples/serve/serve.py --rate 40 --requests 200   # 40 requests a second arrive
python examples/serve/serve.py --prompt "Anne Elliot"     # one prompt, alone
python examples/serve/serve.py --replicas 2               # two processes, a GPU each

Requests share the pages of a common beginning. The last lines say how many tokens came in a second
and how long a token took: half of them less than p50, one in a hundred more than p99. --check runs
each request alone as well, in float32 without a cache, and ends with 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

try:
    import torch
except ImportError:
    print("this example needs PyTorch: pip install torch")
    sys.exit(0)

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from model import TEXT, train
from replicas import Replicas
from server import Request, Server

COMMON = "Sir Walter Elliot, of Kellynch Hall, in Somersetshire, was a man who, "
PROMPTS = ("for his own amusement,", "never took up any book", "Anne Elliot", "Captain Wentworth")


def alone(model, prompt, count):
    """Greedy tokens of one prompt, all keys computed anew for each: what a server must equal."""
    tokens = torch.tensor([prompt], device=model.tokens.weight.device)
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens[0, len(prompt) :].tolist()


def load(characters, asked):
    """Requests that arrive at random; three of four begin alike."""
    draw = random.Random(3)
    text = TEXT.read_text()
    found, arrival = [], 0.0
    for n in range(asked.requests):
        start = draw.randrange(len(text) - 200)
        own = text[start : start + draw.randint(4, asked.longest)]
        prompt = characters.encode((COMMON if n % 4 else "") + own)
        found.append(Request(prompt, draw.randint(8, asked.new), arrival))
        arrival += draw.expovariate(asked.rate) if asked.rate else 0.0
    return found


def quantile(values, share):
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def report(console, server, requests, asked):
    """Tokens a second, and how long a token took."""
    first = [r.times[0] - r.arrival for r in requests]
    later = [b - a for r in requests for a, b in zip(r.times, r.times[1:])] or first
    count = sum(len(r.times) for r in requests)
    took = max(r.times[-1] for r in requests) - min(r.arrival for r in requests)
    shared = sum(r.num_shared for r in requests) / sum(len(r.prompt) for r in requests)
    console.print(
        f"{len(requests)} requests, {count} tokens in {took:.2f} s: {count / took:.0f} tokens/s; "
        f"{server.num_steps} steps, {shared:.0%} of prompts shared, {server.num_preempted} put back"
    )
    line = {
        "replicas": asked.replicas, "requests": len(requests), "tokens": count,
        "tokens_a_second": count / took, "steps": server.num_steps, "shared": shared,
    }  # fmt: skip
    for name, times in (("first token", first), ("next tokens", later)):
        p50, p99 = (quantile(times, share) * 1e3 for share in (0.5, 0.99))
        console.print(f"{name}: p50 {p50:.2f} ms, p99 {p99:.2f} ms")
        line |= {f"{name}, p50_ms": p50, f"{name}, p99_ms": p99}
    if asked.output:
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        with open(asked.output, "a") as file:
            file.write(json.dumps({**line, "card": card, "torch": torch.__version__}) + "\n")


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--prompt", help="answer this one, and end")
    parser.add_argument("--requests", type=int, default=64, help="of the load test")
    parser.add_argument("--rate", type=float, default=0.0, help="arrivals a second; 0: all at once")
    parser.add_argument("--longest", type=int, default=80, help="own characters of a prompt")
    parser.add_argument("--new", type=int, default=48, help="most new tokens of a request")
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--most-requests", type=int, default=32, help="at once")
    parser.add_argument("--most-tokens", type=int, default=256, help="of a step")
    parser.add_argument("--replicas", type=int, default=1, help="processes, a GPU each")
    parser.add_argument("--bfloat16", action="store_true", help="the caches and the model")
    parser.add_argument("-o", "--output", help="file that gets a line of the load test")
    parser.add_argument("--check", action="store_true", help="compare with each request alone")
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    asked = parsed(arguments)
    console = Console(soft_wrap=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=asked.steps)
        model, characters = train(
            asked.steps, device,
            lambda loss: progress.update(task, advance=1, description=f"training, loss {loss:.2f}"),
        )  # fmt: skip
    dtype = torch.bfloat16 if asked.bfloat16 else torch.float32
    model = model.to(dtype)
    sizes = (asked.pages, asked.page_size, asked.most_requests, asked.most_tokens, dtype,
             asked.bfloat16)  # fmt: skip

    replicas = Replicas(model, asked.replicas, *sizes) if asked.replicas > 1 else None

    def served(requests, advance=None):
        server = replicas or Server(model, *sizes)
        return server, server.run(requests, advance)

    prompts = [asked.prompt] if asked.prompt else [COMMON + x for x in PROMPTS]
    _, requests = served([Request(characters.encode(x), asked.new) for x in prompts])
    for request in requests:
        text = characters.decode(request.new).replace("\n", " ")
        console.print(f"...{characters.decode(request.prompt)[-30:]!r} -> {text!r}", markup=False)
    if not asked.prompt:
        done = []
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("serving", total=asked.requests)

            def advance(finished, server):
                done.extend(finished)
                count = sum(len(r.new) for r in done)
                said = f"serving, {count / server.now():.0f} tokens/s"
                progress.update(task, advance=len(finished), description=said)

            server, requests = served(load(characters, asked), advance)
        report(console, server, requests, asked)
    if replicas is not None:
        replicas.close()
    if not asked.check:
        return 0

    def by_itself(request):
        if not asked.bfloat16:
            return alone(model, request.prompt, request.most_new)
        (found,) = Server(model, *sizes).run([Request(request.prompt, request.most_new)])
        return found.new

    differ = sum(r.new != by_itself(r) for r in requests)
    console.print(f"{differ} of {len(requests)} requests differ from their runs alone")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
