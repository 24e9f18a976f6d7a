"""Options: how a layout runs. The layout says who holds what; these say in which way, and what the router pays for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, get_args

Schedule = Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
ContextMode = Literal["ulysses", "ring"]
Recompute = Literal["none", "full", "selective", "memory_budget"]
Reshard = Literal["default", "always", "never"]

ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that run the gradient of the inputs and that of the weights apart."""


_LEAST_LAYERS = {"pp_first_stage_less_layers": 0, "pp_last_stage_less_layers": 0, "pp_layers_per_stage": 1}


@dataclass(frozen=True)
class Options:
    """Choices beside the layout. The defaults run everywhere. Those named ``moe_`` change what is learned, others not.

    Attributes:
        context: ``ulysses`` exchanges heads for tokens over as many context ranks as the heads allow, and goes around a
            ring of the rest; ``ring`` only goes around the ring.
        pp_schedule: order of the micro-batches in a pipeline; ignored with one stage.
        pp_layers_per_stage: layers of a virtual stage in the interleaved schedules; None gives every rank two stages.
        pp_first_stage_less_layers, pp_last_stage_less_layers: layers that the stages of the embedding and of the head
            have fewer than the others.
        reshard_after_forward: free gathered parameters after forward; ``default`` does so for layers, except in a
            pipeline, which would gather them again for every micro-batch.
        offload_params: keep parameters, gradients and optimizer states in host memory.
        ac_mode: what backward recomputes: nothing, every layer, ``selective`` (see below), or as many layers as the
            ``memory_budget`` asks for.
        selective_ac_option: ``op`` keeps the results of matrix products and attention and recomputes the rest of every
            layer; a number n recomputes every n-th layer.
        ac_memory_budget: share of the activations that ``none`` would keep, from 0 to 1.
        compile: backend of ``torch.compile`` for each layer, or None.
        deterministic: use deterministic algorithms only, in the whole process.
        moe_router_bias_update_rate: step of the balance bias that is added to the router's scores for the choice of
            experts (arXiv 2408.15664); 0 has no bias. Exported folders hold it, in fp32, but neither transformers nor
            rollout engines read it for the families here: sampling needs router replay, or a model trained without it.
        moe_aux_loss_coeff: weight of the balance loss per sequence (DeepSeek-V3 report, eq. 17-20).
        moe_z_loss_coeff: weight of the router's z-loss (arXiv 2202.08906, eq. 5).

    Raises:
        ValueError: a value outside its range.
    """

    context: ContextMode = "ulysses"
    pp_schedule: Schedule = "1F1B"
    pp_layers_per_stage: int | None = None
    pp_first_stage_less_layers: int = 1
    pp_last_stage_less_layers: int = 1
    reshard_after_forward: Reshard = "default"
    offload_params: bool = False
    ac_mode: Recompute = "none"
    selective_ac_option: int | Literal["op"] = "op"
    ac_memory_budget: float = 0.5
    compile: str | None = None
    deterministic: bool = False
    moe_router_bias_update_rate: float = 0.0
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("context", get_args(ContextMode)),
            ("pp_schedule", get_args(Schedule)),
            ("reshard_after_forward", get_args(Reshard)),
            ("ac_mode", get_args(Recompute)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(allowed)}")
        if self.selective_ac_option != "op" and not (
            type(self.selective_ac_option) is int and self.selective_ac_option >= 1
        ):
            raise ValueError(f"selective_ac_option is {self.selective_ac_option!r}; it is 'op' or a number of layers")
        if not _within(self.ac_memory_budget, 1):
            raise ValueError(f"ac_memory_budget is {self.ac_memory_budget!r}; it is a share from 0 to 1")
        for name, least in _LEAST_LAYERS.items():
            value = getattr(self, name)
            if not ((type(value) is int and value >= least) or (value is None and name == "pp_layers_per_stage")):
                raise ValueError(f"{name} is {value!r}; it is a number of layers from {least}")
        for name in ("moe_router_bias_update_rate", "moe_aux_loss_coeff", "moe_z_loss_coeff"):
            if not _within(getattr(self, name), sys.float_info.max):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is 0 or above")
        for name in ("offload_params", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is True or False")
        if not (self.compile is None or isinstance(self.compile, str)):
            raise ValueError(f"compile is {self.compile!r}; it names a backend of torch.compile, such as 'inductor'")


def _within(value: object, most: float) -> bool:
    """Whether a value is a number from 0 to ``most``; NaN is not."""
    return type(value) in (int, float) and 0 <= value <= most  # type: ignore[operator]
