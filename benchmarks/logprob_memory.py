"""Peak memory of the LM head's log-probabilities, forward and backward, against their inputs and gradients.

    python benchmarks/logprob_memory.py --json benchmarks/results/logprob_memory.json

Each case runs in a process of its own. Memory is the peak of the resident set above what was resident before the inputs
were made, so it holds inputs, gradients and whatever exists between them. ``overhead`` divides it by the bytes of
inputs and gradients. ``naive`` makes all logits, as ``cross_entropy`` needs them, and takes fewer tokens because it
would not fit otherwise. ``ratio`` is the naive bytes per token above inputs and gradients ÷ ours, in bf16. Exits with 1
when linear_logprob exceeds its limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from report import argument_parser, write_report

LIMIT = 1.2
CASES = {  # implementation, dtype, tokens as a part of --tokens
    "linear_logprob bfloat16": ("linear_logprob", "bfloat16", 1),
    "linear_logprob float32": ("linear_logprob", "float32", 1),
    "naive bfloat16": ("naive", "bfloat16", 4),
    "naive float32": ("naive", "float32", 4),
}


def measure(implementation: str, dtype: str, tokens: int, width: int, vocab: int) -> dict[str, float]:
    """Bytes of one forward and backward in this process, whose peak must not have been higher before."""
    import psutil
    import torch

    from archon.device import peak_memory_bytes
    from archon_kernels.linear_logprob import linear_logprob

    def logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if implementation == "linear_logprob":
            return linear_logprob(hidden, weight, targets).logprobs
        return -torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), targets, reduction="none")

    def inputs(tokens: int, width: int, vocab: int) -> list[torch.Tensor]:
        hidden = torch.empty(tokens, width, dtype=getattr(torch, dtype)).normal_().requires_grad_()
        weight = torch.empty(vocab, width, dtype=hidden.dtype).normal_(std=0.02).requires_grad_()
        return [hidden, weight, torch.randint(vocab, (tokens,))]

    logprobs(*inputs(256, 64, 512)).sum().backward()  # libraries load, threads start
    before = psutil.Process().memory_info().rss
    tensors = inputs(tokens, width, vocab)
    start = time.perf_counter()
    logprobs(*tensors).sum().backward()
    seconds = time.perf_counter() - start
    needed = sum(x.nbytes + (x.grad.nbytes if x.grad is not None else 0) for x in tensors)
    return {
        "peak_bytes": peak_memory_bytes(torch.device("cpu")) - before,
        "inputs_and_gradients_bytes": needed,
        "seconds": seconds,
    }


def main() -> None:
    parser = argument_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192, help="a quarter of them for the naive way (default 8192)")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--measure", nargs=3, metavar=("IMPLEMENTATION", "DTYPE", "TOKENS"), help="one case, in here")
    args = parser.parse_args()
    if args.measure:
        implementation, dtype, tokens = args.measure
        print(json.dumps(measure(implementation, dtype, int(tokens), args.width, args.vocab)))
        return

    found: dict[str, dict[str, Any]] = {}
    for name, (implementation, dtype, part) in CASES.items():
        tokens = args.tokens // part
        command = [sys.executable, __file__, "--width", f"{args.width}", "--vocab", f"{args.vocab}"]
        command += ["--measure", implementation, dtype, f"{tokens}"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=3600)
        result = json.loads(done.stdout.splitlines()[-1])
        result["overhead"] = result["peak_bytes"] / result["inputs_and_gradients_bytes"]
        result["tokens"] = tokens
        result["bytes_between_per_token"] = (result["peak_bytes"] - result["inputs_and_gradients_bytes"]) / tokens
        found[name] = result
        print(
            f"{name:24s} T={tokens:5d}  {result['peak_bytes'] / 2**20:7.0f} MiB  inputs and gradients "
            f"{result['inputs_and_gradients_bytes'] / 2**20:6.0f} MiB  {result['overhead']:5.2f}x  "
            f"{result['seconds']:6.1f} s",
            flush=True,
        )
    naive, ours = (found[f"{name} bfloat16"]["bytes_between_per_token"] for name in ("naive", "linear_logprob"))
    write_report(
        args.json,
        unit="bytes",
        samples={name: [result["peak_bytes"]] for name, result in found.items()},
        ratio=naive / ours,
        cases=found,
        limit=LIMIT,
    )
    ours_overhead = {name: result["overhead"] for name, result in found.items() if name.startswith("linear_logprob")}
    if above := [name for name, overhead in ours_overhead.items() if overhead > LIMIT]:
        sys.exit(f"more than {LIMIT} x (inputs + gradients): {', '.join(above)}")


if __name__ == "__main__":
    main()
