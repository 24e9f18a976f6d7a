"""Tokens per second of layouts against torchtitan, and against a transformers loop under fully_shard.

    python benchmarks/layouts_cpu.py --torchtitan-python PATH --json benchmarks/results/layouts_cpu.json

All train the same model shape on the same tokens with AdamW over fp32 weights and clipping, without recomputation of
layers or compilation, in as many processes, in fp32 and in bf16 compute with fp32 reduction. torchtitan always computes
experts in bf16, so it competes with experts only there. Sequences have equal lengths and no prompts, so that nobody
pads. Each contender runs in fresh processes, in turn. torchtitan is left out where no Python that has it is named
(``pip install torchtitan==0.3.0 triton``, in an environment of its own); the transformers loop always runs, on the
layouts that it has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
DENSE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MOE = {
    **DENSE,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "output_router_logits": False,
}
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Case:
    """One comparison: a model, our layout, torchtitan's degrees, and whether the loop under fully_shard competes.

    The loop shards data over all ranks. That is what d2 and d2e2 do with the dense part, and it needs no exchange of
    tokens where experts would be split.
    """

    name: str
    shape: dict[str, Any]
    layout: str
    torchtitan: dict[str, int]
    fully_sharded: bool
    world: int = 2


CASES = (
    Case("dense d2", DENSE, "d2", {"data_parallel_shard_degree": 2}, True),
    Case("dense d1t2", DENSE, "d1t2", {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2}, False),
    Case("moe d2e2", MOE, "d2e2", {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}, True),
)


def archon_step(settings: dict[str, Any]) -> Callable[[], float]:
    """Our step; the whole batch goes in everywhere."""
    import torch

    import archon

    sequence, ids = settings["sequence"], torch.tensor(settings["ids"])
    engine = archon.Engine.from_pretrained(
        settings["folder"],
        layout=settings["layout"],
        dtype=settings["dtype"],
        optimizer=archon.OptimizerConfig(lr=1e-5),
        max_tokens_per_mb=ids.numel(),
        init_from_scratch=True,
        seed=settings["seed"],
    )
    batch = archon.PackedBatch(ids, torch.arange(0, ids.numel() + 1, sequence))
    loss = archon.LossSpec("archon.losses.SupervisedLoss")
    return lambda: engine.train_step(batch, loss)["loss"]


def transformers_step(settings: dict[str, Any]) -> Callable[[], float]:
    """The loop that one writes by hand: each layer under fully_shard, this rank's rows of the batch."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    dist.init_process_group("gloo")
    torch.manual_seed(settings["seed"])
    options = {"experts_implementation": "grouped_mm"} if "num_experts" in settings["shape"] else {}
    config = AutoConfig.from_pretrained(settings["folder"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    compute = None if settings["dtype"] == "float32" else getattr(torch, settings["dtype"])
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.tensor(settings["ids"]).view(-1, settings["sequence"])
    ids = ids.chunk(dist.get_world_size())[dist.get_rank()]

    def step() -> float:
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return step


def run(contender: str, python: str, settings: dict[str, Any], world: int, seconds: float) -> dict[str, Any]:
    """Run a contender in fresh processes: what its rank 0 printed, or ``failure`` with its last words."""
    script = ["contenders/torchtitan_rank.py"] if contender == "torchtitan" else ["layouts_cpu.py", "--rank", contender]
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    command += [str(HERE / script[0]), *script[1:], json.dumps(settings)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            output, errors = launcher.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"failure": f"not done in {seconds:g} s"}
        finally:
            launcher.terminate()  # it ends its ranks; nothing happens if it has ended
    for line in reversed(output.splitlines()):
        if line.startswith('{"seconds"'):
            found: dict[str, Any] = json.loads(line)
            return found
    named = [line for line in errors.splitlines() if "Error" in line]
    return {"failure": named[0] if named else f"exit code {launcher.returncode}"}


def contenders(case: Case, dtype: str, torchtitan: str | None) -> dict[str, str]:
    """Who competes in a case, and the Python that runs it."""
    found = {"archon": sys.executable}
    if torchtitan is not None and (case.shape is DENSE or dtype == "bfloat16"):
        found["torchtitan"] = torchtitan
    if case.fully_sharded:
        found["transformers"] = sys.executable
    return found


def make_folder(shape: dict[str, Any], folder: Path) -> str:
    """A model folder without weights, which each contender draws."""
    from transformers import AutoConfig

    kind = "qwen3_moe" if "num_experts" in shape else "qwen3"
    config = AutoConfig.for_model(kind, **shape)
    config.architectures = ["Qwen3MoeForCausalLM" if "num_experts" in shape else "Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


@dataclass
class Results:
    """What was found, by "case dtype contender"."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    """Tokens per second of each step."""
    processor_seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of each step, over all ranks."""
    first_losses: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    torchtitan_versions: dict[str, str] = field(default_factory=dict)
    """Of the environment that torchtitan ran in."""

    def add(self, name: str, found: dict[str, Any], tokens: int) -> None:
        if "failure" in found:
            self.failures[name] = found["failure"]
            return
        self.samples.setdefault(name, []).extend(tokens / seconds for seconds in found["seconds"])
        self.processor_seconds.setdefault(name, []).extend(found["processor_seconds"])
        self.first_losses[name] = found["loss"]
        self.torchtitan_versions.update(found.get("versions", {}))

    def against_ours(self, values: dict[str, list[float]]) -> dict[str, float]:
        """Ours ÷ theirs, of medians."""
        found = {}
        for name, theirs in values.items():
            case, _, contender = name.rpartition(" ")
            if contender != "archon" and f"{case} archon" in values:
                found[name] = median(values[f"{case} archon"]) / median(theirs)
        return found


def compare(args: argparse.Namespace, folder: Path) -> Results:
    """Run every contender of every case, the order reversed in every other round."""
    import torch

    results = Results()
    ids = torch.randint(DENSE["vocab_size"], (args.tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    for round_ in range(args.rounds):
        for case, dtype in product(CASES, DTYPES):
            settings = {
                "folder": make_folder(case.shape, folder / case.name.replace(" ", "_")),
                "shape": case.shape,
                "layout": case.layout,
                "torchtitan": case.torchtitan,
                "dtype": dtype,
                "ids": ids,
                "sequence": args.sequence,
                "sequences": args.tokens // args.sequence,
                "steps": args.steps,
                "seed": round_,  # of the weights: how evenly routers load the experts is luck, which rounds average
            }
            order = list(contenders(case, dtype, args.torchtitan_python).items())
            for contender, python in order if round_ % 2 == 0 else reversed(order):
                found = run(contender, python, settings, case.world, args.deadline)
                results.add(f"{case.name} {dtype} {contender}", found, args.tokens)
                print(f"{case.name} {dtype} {contender}: {found}", file=sys.stderr)
    return results


def main() -> None:
    from contenders.steps import measure
    from report import argument_parser, write_report

    parser = argument_parser(__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--torchtitan-python", metavar="PATH", help="a Python that has torchtitan 0.3.0 and triton")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step (default 2048)")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sequence (default 256)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a process (default 3)")
    parser.add_argument("--rounds", type=int, default=2, help="fresh processes of each contender (default 2)")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds of one of them (default 300)")
    parser.add_argument("--rank", nargs=2, metavar=("CONTENDER", "SETTINGS"), help="be one rank of a contender")
    args = parser.parse_args()
    if args.rank:
        contender, settings = args.rank[0], json.loads(args.rank[1])
        measure({"archon": archon_step, "transformers": transformers_step}[contender](settings), settings["steps"])
        return
    if args.tokens % (2 * args.sequence):
        parser.error(f"--tokens {args.tokens} is no even number of sequences of {args.sequence}")
    if args.torchtitan_python is None:
        print("torchtitan is left out: --torchtitan-python names no Python that has it")

    with tempfile.TemporaryDirectory() as folder:
        results = compare(args, Path(folder))
    ratios = results.against_ours(results.samples)
    write_report(
        args.json,
        unit="tokens/s",
        samples=results.samples,
        ratio=min(ratios.values(), default=None),
        ratios=ratios,
        processor_seconds=results.processor_seconds,
        processor_ratios={name: 1 / ratio for name, ratio in results.against_ours(results.processor_seconds).items()},
        first_losses=results.first_losses,
        failures=results.failures,
        torchtitan_versions=results.torchtitan_versions,
    )
    for name, values in results.samples.items():
        ratio = f"ours ÷ theirs {ratios[name]:.2f}" if name in ratios else ""
        used, loss = median(results.processor_seconds[name]), results.first_losses[name]
        print(f"{name:32s} {median(values):7.0f} tokens/s  {used:6.2f} s of processors  loss {loss:.4f}  {ratio}")
    for name, failure in results.failures.items():
        print(f"{name:32s} failed: {failure}")


if __name__ == "__main__":
    main()
