"""Measures layouts one after another: speed, share of the hardware's peak, memory, and bytes sent.

Every layout runs in fresh processes of this machine, or, in a job that a launcher such as torchrun started, in the
processes that exist. ``python -m archon.bench`` is one of those fresh processes.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist

from archon.batch import PackedBatch
from archon.communication import CommunicationCounter
from archon.device import collectives_backends, own_device, peak_memory_bytes
from archon.engine import Engine
from archon.layout import Layout
from archon.losses import LossSpec
from archon.models.config import ModelConfig
from archon.models.decoder import Decoder
from archon.optim import OptimizerConfig
from archon.options import Options
from archon.parallel.fit import check_fit
from archon.processes import Report, failure_of, first_failure, run_ranks, serve

LOSS = LossSpec("archon.losses.SupervisedLoss")


@dataclass(frozen=True)
class Workload:
    """What every layout of a comparison does.

    Attributes:
        model: folder with ``config.json``; the weights are drawn from scratch if it has none.
        tokens, sequences: of the batch of each step. Lengths vary evenly from half of their mean to one and a half.
        steps: measured, after ``warmup`` steps and one whose communication is counted.
        dtype, max_tokens_per_mb, options: of ``Engine.from_pretrained``.
        deadline: seconds that one layout may take; under a launcher, one collective.

    Raises:
        FileNotFoundError: the folder has no ``config.json``.
        ValueError: a count out of range, or a model that is not supported.
    """

    model: str
    tokens: int = 4096
    sequences: int = 16
    steps: int = 3
    warmup: int = 1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_tokens_per_mb: int = 8192
    options: Options = field(default_factory=Options)
    deadline: float = 600.0

    def __post_init__(self) -> None:
        for name, least in (("sequences", 1), ("tokens", 4 * self.sequences), ("steps", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; it is float32 or bfloat16")
        ModelConfig.from_folder(self.model)

    def batch(self) -> PackedBatch:
        """The same random tokens in every process."""
        generator = torch.Generator().manual_seed(1)
        mean = self.tokens / self.sequences
        borders = [0]
        for index in range(self.sequences):
            spread = (index + 0.5) / self.sequences - 0.5  # from -1/2 to 1/2, 0 on average
            borders.append(borders[-1] + round(mean * (1 + spread)))
        borders[-1] = self.tokens
        vocabulary = ModelConfig.from_folder(self.model).vocab_size
        ids = torch.randint(vocabulary, (self.tokens,), generator=generator)
        return PackedBatch(ids, torch.tensor(borders))


@dataclass(frozen=True)
class Measurement:
    """What one layout did, or why it did not.

    Attributes:
        layout: as it was asked for.
        failure: the reason, in which case nothing below is known.
        seconds: of each measured step, by its slowest rank.
        tokens: of a step.
        flops: of a step, forward and backward; see ``model_flops``.
        matmul_flops: FLOP/s of a large matrix product, of all processes at once: what they could reach.
        peak_memory_bytes: by rank: allocated on an accelerator, resident on the CPU.
        communication_bytes: sent in one step by all ranks, by kind; see ``CommunicationCounter``.
        loss: of the first step. Layouts that agree on it compute the same.
    """

    layout: str
    failure: str | None = None
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    flops: float = 0.0
    matmul_flops: float = 0.0
    peak_memory_bytes: list[int] = field(default_factory=list)
    communication_bytes: dict[str, int] = field(default_factory=dict)
    loss: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """By the median step."""
        return self.tokens / median(self.seconds) if self.seconds else 0.0

    @property
    def flops_per_second(self) -> float:
        return self.flops / median(self.seconds) if self.seconds else 0.0


def parse_options(assignments: Sequence[str]) -> Options:
    """``Options`` from ``name=value`` texts, such as ``pp_schedule=ZBVZeroBubble`` or ``deterministic=true``.

    Raises:
        ValueError: an unknown name, or a value that it does not take.
    """
    known = [option.name for option in fields(Options)]
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name not in known:
            raise ValueError(f"option {assignment!r}: write NAME=VALUE; the names are {', '.join(known)}")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return Options(**values)


def model_flops(config: ModelConfig, lengths: Sequence[int]) -> float:
    """Floating-point operations that training on sequences of these lengths needs, recomputation not counted.

    ``6 N T + 6 L H h Σ S²``: two for each of the N parameters that a token of T meets in a matrix product, twice that
    in backward; and causal attention of L layers with H heads of size h over sequences of S tokens, half of
    ``12 L H h S²``. N has the head and ``experts_per_token`` of the experts, but not the embedding, which is looked up.
    """
    with torch.device("meta"):
        model = Decoder(config)
    active = 0.0
    for name, parameter in model.named_parameters():
        if ".experts." in name and config.moe is not None:
            active += parameter.numel() * config.moe.experts_per_token / config.moe.num_experts
        elif "embed_tokens" not in name or config.tie_word_embeddings:
            active += parameter.numel()
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 6 * active * sum(lengths) + 6.0 * attention * sum(length**2 for length in lengths)


def run(layouts: Sequence[str], workload: Workload, world: int | None = None) -> Iterator[Measurement]:
    """Measure layouts one after another, each in fresh processes of this machine.

    A layout that cannot run, or whose process raises, dies or is late, gives a Measurement with the reason.

    Args:
        layouts: such as ``d2`` or ``(attn:d1t2|ffn:t1e2)``.
        world: processes that every layout must use; None takes as many as each layout has ranks.
    """
    for layout in layouts:
        failure = _misfit(layout, workload, world)
        if failure is not None:
            yield Measurement(layout, failure)
            continue
        call = {"layout": layout, "workload": asdict(workload)}
        try:
            reports = run_ranks(__name__, call, Layout.parse(layout).world_size, workload.deadline)
        except TimeoutError as error:
            yield Measurement(layout, str(error))
        else:
            yield _measured(layout, workload, reports)


def run_here(layouts: Sequence[str], workload: Workload) -> Iterator[Measurement]:
    """Measure layouts in the processes that a launcher started; each of them calls this and gets the same results.

    On the CPU, memory is the most that the process ever had, so only that of the first layout says something.
    """
    store, rank, world = next(iter(dist.rendezvous("env://")))
    store.set_timeout(timedelta(seconds=2 * workload.deadline))  # a rank that waits for a collective is late by one
    for number, layout in enumerate(layouts):
        failure = _misfit(layout, workload, world)
        if failure is not None:
            yield Measurement(layout, failure)
            continue
        job = dist.PrefixStore(f"layout{number}", store)
        job.set(f"report{rank}", json.dumps(_report(layout, workload, job, rank, world)))
        yield _measured(layout, workload, [json.loads(job.get(f"report{peer}")) for peer in range(world)])


def launched_world() -> int | None:
    """Number of processes of the launcher's job that this one is part of; None outside any."""
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def _misfit(layout: str, workload: Workload, world: int | None) -> str | None:
    """Why a layout cannot run, before anything is started."""
    try:
        check_fit(Layout.parse(layout), ModelConfig.from_folder(workload.model), workload.options, world_size=world)
    except ValueError as error:
        return str(error)
    return None


def _measured(layout: str, workload: Workload, reports: Sequence[Report]) -> Measurement:
    """One measurement from the reports of all ranks."""
    failure = first_failure(reports)
    if failure is not None:
        return Measurement(layout, failure)
    sent: Counter[str] = Counter()
    for report in reports:
        sent.update(report["communication_bytes"])
    lengths = workload.batch().lengths.tolist()
    return Measurement(
        layout,
        seconds=[max(step) for step in zip(*(report["seconds"] for report in reports), strict=True)],
        tokens=sum(lengths),
        flops=model_flops(ModelConfig.from_folder(workload.model), lengths),
        matmul_flops=sum(report["matmul_flops"] for report in reports),
        peak_memory_bytes=[report["peak_memory_bytes"] for report in reports],
        communication_bytes={kind: round(size) for kind, size in sent.items()},
        loss=reports[0]["loss"],
    )


# One rank


def _report(layout: str, workload: Workload, store: dist.Store, rank: int, world: int) -> Report:
    """Join the group of this layout, measure, and leave it: what this rank found, or its failure."""
    try:
        device = own_device()
        dist.init_process_group(
            collectives_backends(device),
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=workload.deadline),
        )
        report = _measure(layout, workload, device)
        store.set(f"done{rank}", "")
        store.wait([f"done{peer}" for peer in range(world)])  # one that left now could cut off another's last read
        return report
    except Exception as error:
        store.set(f"done{rank}", "")
        return failure_of(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # after a failure, peers that wait for this rank fail now and not much later
        gc.collect()


def _measure(layout: str, workload: Workload, device: torch.device) -> dict[str, Any]:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    engine = Engine.from_pretrained(
        workload.model,
        layout=layout,
        optimizer=OptimizerConfig(),
        dtype=workload.dtype,
        device=device,
        max_tokens_per_mb=workload.max_tokens_per_mb,
        options=workload.options,
        init_from_scratch=not any(Path(workload.model).glob("*.safetensors")),
    )
    batch = workload.batch()
    losses = [engine.train_step(batch, LOSS)["loss"] for _ in range(workload.warmup)]
    with CommunicationCounter() as counter:
        losses.append(engine.train_step(batch, LOSS)["loss"])
    seconds = []
    for _ in range(workload.steps):
        start = time.perf_counter()
        engine.train_step(batch, LOSS)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": seconds,
        "loss": losses[0],
        "peak_memory_bytes": peak_memory_bytes(device),
        "communication_bytes": counter.bytes,
        "matmul_flops": _matmul_flops(device, getattr(torch, workload.dtype)),
    }


def _matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product in this process, while all others run theirs."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    seconds = []
    dist.barrier()
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / median(seconds[1:])


def main() -> None:
    def work(call: dict[str, Any], store: dist.Store, rank: int, world: int) -> Report:
        arguments = call["workload"]
        workload = Workload(**{**arguments, "options": Options(**arguments["options"])})
        return _report(call["layout"], workload, store, rank, world)

    serve(work)


if __name__ == "__main__":
    main()
