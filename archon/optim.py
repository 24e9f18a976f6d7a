"""Optimizer, learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW ("adam", Loshchilov & Hutter 2019) or SGD over fp32 parameters, and how the learning rate moves.

    Attributes:
        lr: peak learning rate.
        weight_decay: decoupled; not applied to vectors (norms and biases).
        lr_scheduler_type: shape after warm-up, down to ``min_lr_ratio * lr`` at ``total_steps``.
        warmup_steps: linear warm-up; None takes ``warmup_steps_proportion`` of ``total_steps``.
        total_steps: training steps of the run; needed by linear and cosine.
        gradient_clipping: largest global gradient norm; 0 turns clipping off.
    """

    type: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-5
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = 0.0
    warmup_steps: int | None = None
    warmup_steps_proportion: float = 0.0
    total_steps: int | None = None
    gradient_clipping: float = 1.0

    def __post_init__(self) -> None:
        if self.lr_scheduler_type != "constant" and not self.total_steps:
            raise ValueError(f"lr_scheduler_type {self.lr_scheduler_type!r} needs total_steps: give the run's length")

    def lr_at(self, step: int) -> float:
        """Learning rate of training step ``step`` (0-based); the last step of the warm-up is at the peak."""
        total = self.total_steps or 0
        warmup = self.warmup_steps
        if warmup is None:
            warmup = math.ceil(self.warmup_steps_proportion * total)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.lr_scheduler_type == "constant":
            return self.lr
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        shape = 1 - progress if self.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * shape)


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Optimizer over this rank's shards of fp32 parameters, which are the masters.

    It updates local tensors in place: its arithmetic is elementwise, and so it need not know how they are distributed.
    """
    shards = [(local_shard(parameter), parameter.ndim) for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [shard for shard, ndim in shards if ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [shard for shard, ndim in shards if ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.type == "sgd":
        return torch.optim.SGD(groups, lr=config.lr)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    for shard, _ in shards:
        # Saving an optimizer without states makes torch take a step of its own to create them, and that step counts.
        optimizer.state[shard] = {
            "step": torch.zeros((), dtype=torch.float32, device=shard.device),
            "exp_avg": torch.zeros_like(shard),
            "exp_avg_sq": torch.zeros_like(shard),
        }
    return optimizer


def apply_gradients(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """One update from the gradients of the parameters that the optimizer was built over."""
    shards = []
    for parameter in parameters:
        shard = local_shard(parameter)
        if shard is not parameter:
            shard.grad = None if parameter.grad is None else local_shard(parameter.grad)
            shards.append(shard)
    optimizer.step()
    for shard in shards:
        shard.grad = None


def gradient_norm(parameters: Iterable[nn.Parameter], group: ProcessGroup | None = None) -> Tensor:
    """Global L2 norm of all gradients, fp64 scalar on the CPU; 0 when there is none.

    Every rank of ``group``, which takes CPU tensors, calls it with its own parameters; None is a single process. A
    piece that several ranks hold counts once.
    """
    total = torch.zeros((), dtype=torch.float64)
    gradients = [(local_shard(p.grad), _copies(p)) for p in parameters if p.grad is not None]
    if gradients:
        norms = torch.stack(torch._foreach_norm([gradient for gradient, _ in gradients])).to("cpu", torch.float64)
        total = (norms.square() / torch.tensor([copies for _, copies in gradients])).sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients so that their global norm is at most ``limit``."""
    scale = float(limit / (norm + 1e-6))
    gradients = [local_shard(p.grad) for p in parameters if p.grad is not None]
    if scale < 1.0 and gradients:
        torch._foreach_mul_(gradients, scale)


def nonfinite_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Names of the parameters of which this rank's gradient holds NaN or infinity."""
    return [
        name
        for name, parameter in named
        if parameter.grad is not None and not torch.isfinite(local_shard(parameter.grad)).all()
    ]


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, sharing its memory; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _copies(parameter: Tensor) -> int:
    """How many ranks hold the same piece of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(mesh.size(axis) for axis, where in enumerate(parameter.placements) if where.is_replicate())
