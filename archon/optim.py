"""Optimizer, learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
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


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Optimizer over the model's trainable parameters, which are fp32 and are the masters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.type == "sgd":
        return torch.optim.SGD(groups, lr=config.lr)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    for parameter in parameters:
        # Saving an optimizer without states makes torch take a step of its own to create them, and that step counts.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global L2 norm of all gradients, fp32 scalar; 0 when there is none."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients so that their global norm is at most ``limit``."""
    scale = float(limit / (norm + 1e-6))
    if scale < 1.0:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)


def nonfinite_gradients(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient holds NaN or infinity."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not torch.isfinite(_local(parameter.grad)).all()
    ]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
