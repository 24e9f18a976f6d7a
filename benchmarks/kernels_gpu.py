"""Every kernel on one accelerator: parity, then time against plain torch, torch.compile and what else is installed.

    PYTHONPATH=.:kernels python benchmarks/kernels_gpu.py --json benchmarks/results/kernels_gpu.json
    PYTHONPATH=.:kernels python benchmarks/kernels_gpu.py --dry

The second goes through all of it with tiny tensors on the CPU, in seconds. Needs torch, triton and this repository,
which need not be installed. Each op runs forward and backward; achieved FLOP/s count what the maths needs, without
recomputation, and achieved bandwidth the bytes that must move; both are compared with a matrix product and a copy
measured in the same run. Exits with 1 when an op of ours fails or misses its tolerance; the report holds the rest.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from archon_kernels.grouped_mm import grouped_linear, grouped_swiglu
from archon_kernels.linear_logprob import linear_logprob
from archon_kernels.permute import combine, permute, sort_by_expert
from archon_kernels.policy_loss import masked_policy_loss
from archon_kernels.routing import topk_gate
from report import argument_parser, write_report

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Of ``|ours - right| / |right|``, right being plain torch in fp64 on the same numbers."""
SKEW_GOAL = 1.3
"""Times that skewed routing may take the time of uniform routing."""
Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Sizes:
    """M rows and V vocabulary of the head, D width, F expert width, E experts, K choices, T tokens, P loss columns."""

    M: int
    V: int
    D: int
    F: int
    E: int
    K: int
    T: int
    P: int


FULL = Sizes(M=8192, V=131_072, D=4096, F=1536, E=128, K=8, T=8192, P=1 << 22)
SMALL = Sizes(M=129, V=1009, D=64, F=48, E=8, K=2, T=129, P=1000)
TINY = Sizes(M=9, V=101, D=16, F=8, E=4, K=2, T=13, P=130)


@dataclass(frozen=True)
class Problem:
    """One op on one set of inputs.

    Attributes:
        inputs: floating-point tensors that get gradients.
        ours: the op, a function of ``inputs``.
        plain: the same in a few lines of torch.
        flops, bytes: what forward and backward need at least.
        others: further implementations by name.
    """

    inputs: tuple[Tensor, ...]
    ours: Function
    plain: Function
    flops: float = 0.0
    bytes: float = 0.0
    others: dict[str, Function] = field(default_factory=dict)


def logprob_problem(s: Sizes, dtype: torch.dtype, device: torch.device, masked: bool) -> Problem:
    hidden = torch.randn(s.M, s.D, device=device).to(dtype)
    weight = (torch.randn(s.V, s.D, device=device) * s.D**-0.5).to(dtype)
    targets = torch.randint(s.V, (s.M,), device=device)
    mask = torch.arange(s.M, device=device) % 2 == 0 if masked else None

    def plain(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        scores = F.linear(hidden, weight)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        logprobs = scores.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
        return (logprobs if mask is None else logprobs * mask,)

    def liger(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        chosen = targets if mask is None else targets.where(mask, -100)
        return (LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, chosen),)

    return Problem(
        (hidden, weight),
        lambda hidden, weight: (linear_logprob(hidden, weight, targets, mask_M=mask).logprobs,),
        plain,
        flops=6.0 * s.M * s.D * s.V * (0.5 if masked else 1.0),
        others={"liger": liger},
    )


def gate_problem(s: Sizes, dtype: torch.dtype, device: torch.device) -> Problem:
    logits = torch.randn(s.T, s.E, device=device).to(dtype)

    def plain(logits: Tensor) -> tuple[Tensor, ...]:
        weights = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).topk(s.K, -1).values
        return (weights / weights.sum(-1, keepdim=True),)

    itemsize = logits.element_size()
    return Problem(
        (logits,),
        lambda logits: (topk_gate(logits, s.K, renormalize=True)[0],),
        plain,
        bytes=s.T * (2.0 * s.E * itemsize + s.K * (4 + 8 + 4)),
    )


def policy_problem(s: Sizes, dtype: torch.dtype, device: torch.device) -> Problem:
    proximal = -torch.rand(s.P, device=device)
    logprobs = (proximal + 0.3 * torch.randn(s.P, device=device)).to(dtype)
    advantages, weights = torch.randn(s.P, device=device), torch.rand(s.P, device=device)
    mask = torch.rand(s.P, device=device) < 0.7

    def ours(logprobs: Tensor) -> tuple[Tensor, ...]:
        out = masked_policy_loss(logprobs, proximal, advantages, mask, eps_clip=0.2, c_clip=3.0, weights_T=weights)
        return out.loss_T, out.ratio, out.kl, out.clipped, out.dual_clipped, out.kept

    def plain(logprobs: Tensor) -> tuple[Tensor, ...]:
        log_ratio = torch.where(mask, logprobs - proximal, 0.0)
        ratio = log_ratio.exp()
        free, bounded = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
        loss = torch.maximum(free, bounded)
        dual = (advantages < 0) & (loss > -3.0 * advantages)
        loss = torch.where(dual, -3.0 * advantages, loss) * weights
        wide = log_ratio.detach().double()
        sums = (wide.exp(), wide.exp() - 1 - wide, bounded > free, dual, mask)
        return torch.where(mask, loss, 0.0), *((column * mask).sum(dtype=torch.float64) for column in sums)

    itemsize = logprobs.element_size()
    return Problem((logprobs,), ours, plain, bytes=s.P * (2.0 * itemsize + 4 * 5 + 1))


def choose_experts(s: Sizes, device: torch.device, skewed: bool) -> Tensor:
    """``[T, K]`` different experts of each token: equally likely, or the e-th in proportion to 1 / e."""
    noise = -torch.rand(s.T, s.E, device=device).log().neg().log()
    if skewed:
        noise = noise - torch.arange(1, s.E + 1, device=device).log()
    return noise.topk(s.K, -1).indices


def sort_problem(s: Sizes, dtype: torch.dtype, device: torch.device, skewed: bool) -> Problem:
    indices = choose_experts(s, device, skewed)

    def ours() -> tuple[Tensor, ...]:
        order = sort_by_expert(indices, s.E)
        return order.source, order.position, order.counts

    def plain() -> tuple[Tensor, ...]:
        source = indices.flatten().argsort(stable=True)
        position = torch.empty_like(source).scatter_(0, source, torch.arange(source.shape[0], device=device))
        return source, position, torch.bincount(indices.flatten(), minlength=s.E)

    return Problem((), ours, plain, bytes=24.0 * s.T * s.K)


def permute_problem(s: Sizes, dtype: torch.dtype, device: torch.device, skewed: bool) -> Problem:
    order = sort_by_expert(choose_experts(s, device, skewed), s.E)
    hidden = torch.randn(s.T, s.D, device=device).to(dtype)
    return Problem(
        (hidden,),
        lambda hidden: (permute(hidden, order),),
        lambda hidden: (hidden.index_select(0, order.source // s.K),),
        bytes=2.0 * (s.T + s.T * s.K) * s.D * hidden.element_size(),
    )


def combine_problem(s: Sizes, dtype: torch.dtype, device: torch.device, skewed: bool) -> Problem:
    order = sort_by_expert(choose_experts(s, device, skewed), s.E)
    rows = torch.randn(s.T * s.K, s.D, device=device).to(dtype)
    weights = torch.rand(s.T, s.K, device=device)

    def plain(rows: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        rows_TKD = rows.index_select(0, order.position).unflatten(0, (s.T, s.K))
        return ((rows_TKD * weights.unsqueeze(-1)).sum(1).to(rows.dtype),)

    return Problem(
        (rows, weights),
        lambda rows, weights: (combine(rows, weights, order),),
        plain,
        bytes=(3.0 * s.T * s.K + 2 * s.T) * s.D * rows.element_size(),
    )


def swiglu_problem(s: Sizes, dtype: torch.dtype, device: torch.device, skewed: bool) -> Problem:
    counts = sort_by_expert(choose_experts(s, device, skewed), s.E).counts
    rows = torch.randn(s.T * s.K, s.D, device=device).to(dtype)
    weight = (torch.randn(s.E, 2 * s.F, s.D, device=device) * s.D**-0.5).to(dtype)

    def plain(rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        gate, up = grouped_product(rows, weight, counts).chunk(2, dim=-1)
        return (F.silu(gate) * up,)

    return Problem(
        (rows, weight),
        lambda rows, weight: (grouped_swiglu(rows, weight, counts),),
        plain,
        flops=12.0 * s.T * s.K * s.D * s.F,
    )


def linear_problem(s: Sizes, dtype: torch.dtype, device: torch.device, skewed: bool) -> Problem:
    counts = sort_by_expert(choose_experts(s, device, skewed), s.E).counts
    rows = torch.randn(s.T * s.K, s.F, device=device).to(dtype)
    weight = (torch.randn(s.E, s.D, s.F, device=device) * s.F**-0.5).to(dtype)
    return Problem(
        (rows, weight),
        lambda rows, weight: (grouped_linear(rows, weight, counts),),
        lambda rows, weight: (grouped_product(rows, weight, counts),),
        flops=6.0 * s.T * s.K * s.D * s.F,
    )


def grouped_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """torch's own grouped product where it takes the dtype, else one product per expert."""
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    parts = zip(rows.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([part @ matrix.t() for part, matrix in parts])


Make = Callable[[Sizes, torch.dtype, torch.device], Problem]


def by_routing(make: Callable[[Sizes, torch.dtype, torch.device, bool], Problem]) -> dict[str, Make]:
    return {
        "uniform": lambda s, dtype, device: make(s, dtype, device, False),
        "skewed": lambda s, dtype, device: make(s, dtype, device, True),
    }


OPS: dict[str, dict[str, Make]] = {
    "linear_logprob": {
        "all rows": lambda s, dtype, device: logprob_problem(s, dtype, device, False),
        "half masked": lambda s, dtype, device: logprob_problem(s, dtype, device, True),
    },
    "topk_gate": {"softmax": gate_problem},
    "masked_policy_loss": {"dual clip": policy_problem},
    "sort_by_expert": by_routing(sort_problem),
    "permute": by_routing(permute_problem),
    "combine": by_routing(combine_problem),
    "grouped_swiglu": by_routing(swiglu_problem),
    "grouped_linear": by_routing(linear_problem),
}
FP32_ONLY = ("topk_gate", "masked_policy_loss")
"""Ops of columns that the engine holds in fp32; the others are timed in bf16, and checked in both."""


def outputs_and_gradients(function: Function, inputs: Sequence[Tensor], pulls: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    return [*outputs, *gradients(outputs, leaves, pulls)]


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], pulls: Sequence[Tensor]) -> tuple[Tensor, ...]:
    pairs = [(y, pull.to(y.dtype)) for y, pull in zip(outputs, pulls, strict=True) if y.requires_grad]
    return torch.autograd.grad([y for y, _ in pairs], leaves, [pull for _, pull in pairs]) if pairs else ()


def parity(make: Make, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> float:
    """Largest relative error of ours over outputs and gradients, against plain torch in fp64."""
    problem = make(sizes, dtype, device)
    wide = [x.double() for x in problem.inputs]
    pulls = [torch.randn_like(y, dtype=torch.float64) for y in problem.plain(*wide)]
    if problem.inputs:
        pulls = [pull.to(problem.inputs[0].dtype).double() for pull in pulls]
    ours = outputs_and_gradients(problem.ours, problem.inputs, pulls)
    right = outputs_and_gradients(problem.plain, wide, pulls)
    errors = [
        float((a - b).detach().double().norm() / b.detach().double().norm().clamp(min=1e-12))
        for a, b in zip(ours, right, strict=True)
    ]
    return max(errors) if all(error == error for error in errors) else float("nan")


def measure(step: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Milliseconds of each of 5 to 50 steps, about ``seconds`` in all, after warm-up."""
    for _ in range(3):
        step()
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    count = max(5, min(50, int(seconds / (time.perf_counter() - start))))
    if device.type == "cpu":
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in pairwise(marks)]
    # Nothing waits between steps, so that the device has its next kernel at hand, as in training.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    synchronize(device)
    return [before.elapsed_time(after) for before, after in pairwise(events)]


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def ceilings(device: torch.device, seconds: float, dry: bool) -> dict[str, float]:
    """What this device reaches here: bytes/s of a copy and FLOP/s of a large bf16 matrix product."""
    size, count = (64, 1 << 12) if dry else (8192, 1 << 30)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    source, target = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    product_ms = median(measure(lambda: a @ b, device, seconds))
    copy_ms = median(measure(lambda: target.copy_(source), device, seconds))
    return {"flops": 2e3 * size**3 / product_ms, "bytes": 2e3 * count / copy_ms}


def time_contender(
    function: Function, problem: Problem, device: torch.device, seconds: float
) -> tuple[list[float], int | None]:
    """Milliseconds of forward and backward, and the most memory in use beside the inputs, None where unknown."""
    leaves = [x.detach().requires_grad_() for x in problem.inputs]
    pulls = [torch.ones_like(y) for y in function(*leaves)]

    def step() -> None:
        gradients(function(*leaves), leaves, pulls)

    if device.type != "cuda":
        return measure(step, device, seconds), None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    samples = measure(step, device, seconds)
    return samples, torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argument_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), help="only these (default: all)")
    parser.add_argument("--dry", action="store_true", help="tiny tensors on the CPU: shows that the script runs")
    parser.add_argument("--seconds", type=float, default=0.5, help="of measurement per contender (default 0.5)")
    parser.add_argument("--budget", type=float, default=270.0, help="seconds after which no contender starts")
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        print("no CUDA or ROCm device here: nothing is measured; --dry shows that the script runs")
        return
    deadline = time.monotonic() + args.budget
    device = torch.device("cpu" if args.dry else "cuda")
    seconds = 0.0 if args.dry else args.seconds
    torch.manual_seed(0)

    failures: list[str] = []
    checks = check_all(args.ops, TINY if args.dry else SMALL, device, failures)
    ceiling = ceilings(device, seconds, args.dry)
    samples: dict[str, list[float]] = {}
    results: list[dict[str, Any]] = []
    for op in args.ops:
        for case, make in OPS[op].items():
            for row in time_case(op, case, make, TINY if args.dry else FULL, device, seconds, deadline):
                samples[" ".join((op, case, row["contender"]))] = row.pop("samples", [])
                if row["contender"] == "archon" and "error" in row:
                    failures.append(f"{op} {case}: {row['error']}")
                results.append(row)
                print(line(row, ceiling), flush=True)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    report(args, checks, ceiling, samples, results, failures)
    if failures:
        sys.exit("\n".join(failures))


def check_all(ops: Sequence[str], sizes: Sizes, device: torch.device, failures: list[str]) -> list[dict[str, Any]]:
    checks: list[dict[str, Any]] = []
    for op in ops:
        for case, make in OPS[op].items():
            for dtype in (torch.float32,) if op in FP32_ONLY else (torch.float32, torch.bfloat16):
                check: dict[str, Any] = {"op": op, "case": case, "dtype": str(dtype), "tolerance": TOLERANCE[dtype]}
                try:
                    check["error"] = parity(make, sizes, dtype, device)
                    passed = check["error"] <= TOLERANCE[dtype]
                except Exception as error:  # one broken op must not cost the device time of the others
                    check["exception"], passed = f"{type(error).__name__}: {error}"[:2000], False
                checks.append(check)
                print(
                    f"parity {op:20s} {case:12s} {dtype!s:15s} {check.get('error', check.get('exception'))}", flush=True
                )
                if not passed:
                    failures.append(f"parity of {op} {case} in {dtype}: {check}")
    return checks


def time_case(
    op: str, case: str, make: Make, sizes: Sizes, device: torch.device, seconds: float, deadline: float
) -> list[dict[str, Any]]:
    """One row per contender: milliseconds, or why there are none."""
    dtype = torch.float32 if op in FP32_ONLY else torch.bfloat16
    common: dict[str, Any] = {"op": op, "case": case, "dtype": str(dtype)}
    try:
        problem = make(sizes, dtype, device)
    except Exception as error:  # its inputs come from other ops, which may be broken
        return [{**common, "contender": "archon", "error": f"{type(error).__name__}: {error}"[:2000]}]
    compiled = torch.compile(problem.plain, backend="inductor" if device.type == "cuda" else "aot_eager")
    contenders = {"archon": problem.ours, "torch": problem.plain, "torch.compile": compiled, **problem.others}
    rows = []
    for name, function in contenders.items():
        row = {**common, "contender": name, "flops": problem.flops, "bytes": problem.bytes}
        rows.append(row)
        if time.monotonic() > deadline:
            row["error"] = "not started: the time budget is spent"
            continue
        try:
            row["samples"], row["peak_bytes"] = time_contender(function, problem, device, seconds)
            row["ms"] = median(row["samples"])
        except Exception as error:  # a contender that is missing or runs out of memory is a result too
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
    torch.compiler.reset()
    return rows


def line(row: dict[str, Any], ceiling: dict[str, float]) -> str:
    who = f"{row['op']:20s} {row['case']:12s} {row['contender']:14s}"
    if "error" in row:
        return f"{who} {row['error'].splitlines()[0][:120]}"
    shares = "".join(
        f"   {row[kind] / row['ms'] * 1e3 / scale:8.1f} {unit} {row[kind] / row['ms'] * 1e3 / ceiling[kind]:5.1%}"
        for kind, scale, unit in (("flops", 1e12, "TFLOP/s"), ("bytes", 1e9, "GB/s"))
        if row[kind]
    )
    memory = "" if row["peak_bytes"] is None else f"   {row['peak_bytes'] / 2**30:7.2f} GiB"
    return f"{who} {row['ms']:9.3f} ms{shares}{memory}"


def report(
    args: Any,
    checks: list[dict[str, Any]],
    ceiling: dict[str, float],
    samples: dict[str, list[float]],
    results: list[dict[str, Any]],
    failures: list[str],
) -> None:
    found = {(row["op"], row["case"], row["contender"]): row["ms"] for row in results if "ms" in row}
    ratios = {
        f"{op} {case} {name}": ms / found[op, case, "archon"]
        for (op, case, name), ms in found.items()
        if name != "archon" and (op, case, "archon") in found
    }
    skew = {
        op: found[op, "skewed", "archon"] / found[op, "uniform", "archon"]
        for op in args.ops
        if (op, "skewed", "archon") in found and (op, "uniform", "archon") in found
    }
    head = "linear_logprob all rows"
    write_report(
        args.json,
        unit="ms",
        samples=samples,
        ratio=ratios.get(f"{head} liger", ratios.get(f"{head} torch.compile")),
        packages=("torch", "triton", "liger-kernel"),
        kernels=os.environ.get("ARCHON_KERNELS"),
        dry=args.dry,
        parity=checks,
        ceilings=ceiling,
        results=results,
        ratios=ratios,
        skewed_over_uniform=skew,
        failures=failures,
    )
    for name, value in ratios.items():
        print(f"{name:45s} takes {value:6.2f} times as long as ours")
    for op, value in skew.items():
        print(f"{op:45s} skewed routing takes {value:.2f} times as long as uniform (goal {SKEW_GOAL})")


if __name__ == "__main__":
    main()
