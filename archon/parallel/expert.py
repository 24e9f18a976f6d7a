"""Expert parallelism: tokens travel to the ranks of their experts and back, and what routers record on the way.

A token's rows go to the ranks of its K experts by all-to-all, whatever the counts: nothing is dropped, an expert may be
empty and one expert may get everything. Expert-tensor ranks first gather each other's tokens, compute with their part
of F, and scatter the sum back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from archon.mesh import Ranks
from archon.parallel.collectives import exchange_rows, gather_tokens, scatter_tokens
from archon_kernels.permute import ExpertOrder, combine, permute, sort_by_expert
from archon_kernels.routing import count_experts

ExpertFunction = Callable[[Tensor, Tensor], Tensor]
"""Rows ``[N, D]`` sorted by expert and counts ``[E/e]`` to rows ``[N, D]``, of the experts of this rank."""


@dataclass(frozen=True, eq=False)
class Routing:
    """What the routers of one micro-batch read and write on this rank, S tokens.

    Written entries are keyed by layer, so that a forward repeated by recomputation writes the same again.

    Attributes:
        real: ``[S]`` bool, False for filler.
        sequence_ids: ``[S]`` int64 sequence of each token in the micro-batch; any value for filler.
        lengths: ``[N]`` int64 tokens of each sequence of the micro-batch, over all ranks.
        tokens: ``[S]`` int64 position of each token in the packed micro-batch.
        aux_scale, z_scale: coefficients of the two losses, divided by the sequences and the tokens of the update.
        recorded: expert choices to use, ``[S, K]`` by layer; an entry of -1 leaves the choice to the router.
        chosen: expert choices made, ``[S, K]`` by layer.
        counts: tokens per expert, ``[E]`` by layer, filler excluded.
        losses: (balance loss, z-loss), already scaled, by layer.
    """

    real: Tensor
    sequence_ids: Tensor
    lengths: Tensor
    tokens: Tensor
    aux_scale: float = 0.0
    z_scale: float = 0.0
    recorded: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def spread_filler(self, indices_SK: Tensor, num_experts: int) -> Tensor:
        """Choices in which filler tokens, which are all alike, visit the experts in turn instead of the same few."""
        turn = torch.arange(indices_SK.numel(), device=indices_SK.device).view_as(indices_SK) % num_experts
        return torch.where(self.real.unsqueeze(-1), indices_SK, turn)

    def record(self, layer: int, indices_SK: Tensor, num_experts: int) -> None:
        """Keep the choices of a layer and count the tokens of each expert."""
        self.chosen[layer] = indices_SK
        self.counts[layer] = count_experts(indices_SK, num_experts, self.real)


def with_router_losses(
    weights_SK: Tensor, logits_SE: Tensor, indices_SK: Tensor, routing: Routing, layer: int, ranks: Ranks
) -> Tensor:
    """The same weights, whose backward also adds the gradient of the balance loss and of the z-loss.

    The losses join the graph here because the last stage of a pipeline, where the loss is, never sees these logits.
    """
    if not (routing.aux_scale or routing.z_scale):
        return weights_SK
    balance = routing.aux_scale * _balance_loss(logits_SE, indices_SK, routing, ranks)
    z = routing.z_scale * torch.where(routing.real, logits_SE.logsumexp(-1), 0.0).square().sum()
    routing.losses[layer] = (balance.detach(), z.detach())
    return _AddLoss.apply(weights_SK, balance + z)


def _balance_loss(logits_SE: Tensor, indices_SK: Tensor, routing: Routing, ranks: Ranks) -> Tensor:
    """This rank's share of the sum over sequences of ``sum_i f_i P_i`` (DeepSeek-V3 report, eq. 17-20).

    f is a count over the whole sequence, so it is summed over the ranks that hold parts of it; P is linear in the
    tokens, so each rank adds the part of its own.
    """
    num_experts, top_k = logits_SE.shape[-1], indices_SK.shape[-1]
    sequences, real = routing.sequence_ids, routing.real.unsqueeze(-1)
    counts_NE = torch.zeros(routing.lengths.shape[0], num_experts, device=logits_SE.device)
    slots = sequences.unsqueeze(-1) * num_experts + indices_SK
    counts_NE.view(-1).scatter_add_(0, slots.flatten(), real.expand_as(slots).flatten().float())
    if ranks.sequence is not None:
        dist.all_reduce(counts_NE, group=ranks.sequence)
    frequency_NE = counts_NE * num_experts / (top_k * routing.lengths.unsqueeze(-1))
    share_SE = frequency_NE[sequences] / routing.lengths[sequences].unsqueeze(-1)
    return torch.where(real, share_SE * logits_SE.softmax(-1), 0.0).sum()


class _AddLoss(torch.autograd.Function):
    """Identity on ``x`` whose backward runs the loss beside it with gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_options = {"dtype": loss.dtype, "device": loss.device}
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), **ctx.loss_options)


def run_experts(
    x_SD: Tensor, weights_SK: Tensor, indices_SK: Tensor, num_experts: int, experts: ExpertFunction, ranks: Ranks
) -> Tensor:
    """Each token's weighted sum over its K experts, wherever these are: ``[S, D] -> [S, D]``.

    Args:
        x_SD: this rank's tokens; all expert-tensor ranks have as many.
        weights_SK: gate weights, fp32.
        indices_SK: experts of each token, in [0, num_experts).
        experts: the function of this rank's experts.
    """
    group = ranks.expert_tensor
    x, weights, indices = (gather_tokens(part, group) for part in (x_SD, weights_SK, indices_SK))
    order = sort_by_expert(indices, num_experts)
    rows = permute(x, order)
    out = experts(rows, order.counts) if ranks.expert is None else _exchange(rows, order.counts, experts, ranks)
    return scatter_tokens(combine(out, weights, order), group)


def _exchange(rows_ND: Tensor, counts_E: Tensor, experts: ExpertFunction, ranks: Ranks) -> Tensor:
    """Send rows to the ranks of their experts, and bring the results back into the same places."""
    ranks_and_experts = (ranks.layout.expert, -1)
    arriving = torch.empty_like(counts_E)
    dist.all_to_all_single(arriving, counts_E, group=ranks.expert)
    arriving = arriving.view(ranks_and_experts)
    sent = counts_E.view(ranks_and_experts).sum(1).tolist()
    received = arriving.sum(1).tolist()

    rows = exchange_rows(rows_ND, received, sent, ranks.expert)
    # They arrive by sender and, below that, by expert.
    local_experts = torch.arange(arriving.shape[1], device=rows.device).repeat(arriving.shape[0])
    order = sort_by_expert(local_experts.repeat_interleave(arriving.flatten()).unsqueeze(-1), arriving.shape[1])
    out = experts(permute(rows, order), order.counts)
    out = permute(out, ExpertOrder(order.position, order.source, order.counts, top_k=1))
    return exchange_rows(out, sent, received, ranks.expert)
