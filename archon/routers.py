"""The routers of a model over one optimizer update: replayed choices, balance bias, balance statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from archon.batch import PackedBatch
from archon.mesh import Ranks
from archon.models.config import MoEConfig
from archon.models.decoder import Decoder
from archon.models.moe import MoE
from archon.options import Options
from archon.parallel.expert import Routing
from archon.report import StepReport

RECORDED = "routed_experts"
"""Token column ``[T, L, K]`` of expert choices to replay (R3, arXiv 2510.11370): L sparse layers or all layers."""


class Routers:
    """What the engine does for the mixture-of-experts layers of a model.

    Args:
        parts: of the model, on this process.
        num_layers: of the whole model.
        moe: its experts.
        ranks: the place of this process.
        options: coefficients of the router losses and rate of the balance bias.
    """

    def __init__(
        self, parts: Iterable[Decoder], num_layers: int, moe: MoEConfig, ranks: Ranks, options: Options
    ) -> None:
        self.num_layers, self.moe, self.ranks, self.options = num_layers, moe, ranks, options
        self.layers = sorted(moe.layers)
        blocks = (layer.mlp for part in parts for layer in part.model.layers.values())
        self.blocks = {block.layer: block for block in blocks if isinstance(block, MoE)}
        self._start()

    def _start(self) -> None:
        self.counts = torch.zeros(len(self.layers), self.moe.num_experts, dtype=torch.long)
        self.balance, self.z = 0.0, 0.0

    def arguments(self, batch: PackedBatch, training: bool) -> dict[str, Any]:
        """For ``MicroBatch.build``: the scale of the losses in one update over ``batch``, and where its choices stand.

        Raises:
            ValueError: recorded choices of another number of layers or experts, or of experts that do not exist.
        """
        losses = self.options if training else Options()
        return {
            "aux_scale": losses.moe_aux_loss_coeff / max(1, batch.num_sequences),
            "z_scale": losses.moe_z_loss_coeff / max(1, batch.num_tokens),
            "recorded": self._recorded(batch[RECORDED]) if RECORDED in batch.tokens else {},
        }

    def _recorded(self, choices: Tensor) -> dict[int, int]:
        """By sparse layer, its place among the layers of the recorded choices."""
        experts, top_k, sparse = self.moe.num_experts, self.moe.experts_per_token, len(self.layers)
        if choices.ndim != 3 or choices.shape[2] != top_k or choices.shape[1] not in (sparse, self.num_layers):
            raise ValueError(
                f"{RECORDED} has shape {tuple(choices.shape)}; this model needs [tokens, {sparse} sparse layers or all "
                f"{self.num_layers}, {top_k} experts each]"
            )
        places = {layer: place for place, layer in enumerate(self.layers)}
        if choices.shape[1] != sparse:
            places = {layer: layer for layer in self.layers}
            for layer in set(range(self.num_layers)) - self.moe.layers:
                if (choices[:, layer] >= 0).any():
                    raise ValueError(f"{RECORDED} has experts for layer {layer}, which is dense: its entries are -1")
        used = choices[:, list(places.values())]
        if used.numel() and (used.min() < -1 or used.max() >= experts):
            wrong = int(used.min() if used.min() < -1 else used.max())
            raise ValueError(
                f"{RECORDED} holds expert {wrong}; the model has experts 0 to {experts - 1}, and -1 for none"
            )
        if ((used < 0).any(-1) != (used < 0).all(-1)).any():
            raise ValueError(
                f"{RECORDED} has -1 for some of a token's {top_k} experts in a layer; give all of them or none"
            )
        ordered = used.sort(-1).values
        if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
            raise ValueError(f"{RECORDED} sends a token to the same expert twice; are layers and experts in order?")
        return places

    def collect(self, routing: Routing) -> None:
        """Add what one micro-batch recorded to the statistics of the update."""
        for place, layer in enumerate(self.layers):
            if layer in routing.counts:
                self.counts[place] += routing.counts[layer].cpu()
            if layer in routing.losses:
                balance, z = routing.losses[layer]
                self.balance += float(balance)
                self.z += float(z)

    def finish_update(self, report: StepReport, updated: bool) -> None:
        """Move the balance bias by the counts of all processes, and report them."""
        if self.ranks.host is not None:
            dist.all_reduce(self.counts, group=self.ranks.host)
        rate = self.options.moe_router_bias_update_rate
        mean = self.counts.double().mean(-1, keepdim=True)
        if updated and rate:
            steps = rate * (mean - self.counts).sign()
            for layer, block in self.blocks.items():
                bias = block.gate.e_score_correction_bias
                assert bias is not None
                bias += steps[self.layers.index(layer)].to(bias)
        one = torch.ones(())
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        if self.ranks.rank == 0:
            violation = self.counts.max(-1).values / mean.squeeze(-1).clamp(min=1e-9) - 1
            idle = (self.counts == 0).double().mean(-1)
            for place, layer in enumerate(self.layers):
                metrics[f"moe/layer_{layer}/max_violation"] = (violation[place], one)
                metrics[f"moe/layer_{layer}/idle_experts"] = (idle[place], one)
        if self.options.moe_aux_loss_coeff:
            metrics["moe/balance_loss"] = (torch.tensor(self.balance), one * (self.ranks.rank == 0))
        if self.options.moe_z_loss_coeff:
            metrics["moe/z_loss"] = (torch.tensor(self.z), one * (self.ranks.rank == 0))
        report.add(0.0, metrics)
        self._start()
