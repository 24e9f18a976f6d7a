"""Dense and mixture-of-experts feed-forward layers (SwiGLU)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from archon.mesh import Ranks
from archon.models.config import ModelConfig, MoEConfig
from archon.parallel.collectives import gather_tokens
from archon.parallel.expert import Routing, run_experts, with_router_losses
from archon.parallel.tensor import ColumnLinear, local, row_linear
from archon_kernels.grouped_mm import grouped_linear, grouped_swiglu
from archon_kernels.routing import topk_gate


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = ColumnLinear(size, inner, bias=bias)
        self.up_proj = ColumnLinear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, x_SD: Tensor, routing: Routing | None = None) -> Tensor:
        x_TD = gather_tokens(x_SD, self.ranks.tensor)
        return row_linear(self.down_proj, F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD), self.ranks)


class Router(nn.Linear):
    """Expert logits ``[S, E]`` in fp32 whatever the compute dtype: rounding would flip close choices.

    Attributes:
        e_score_correction_bias: ``[E]`` fp32 buffer added to the scores for the choice of experts only, or None.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, hidden_size: int, num_experts: int, with_bias: bool) -> None:
        super().__init__(hidden_size, num_experts, bias=False)
        bias = torch.zeros(num_experts, dtype=torch.float32) if with_bias else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), local(self.weight).float())


class Experts(nn.Module):
    """The stacked weights of E SwiGLU experts: ``gate_up_proj [E, 2F, D]`` (gate first), ``down_proj [E, D, F]``.

    Split over expert-tensor ranks, the first is ``[E, 2, F, D]``, so that each rank has a part of both halves.
    """

    def __init__(self, hidden_size: int, moe: MoEConfig, ranks: Ranks) -> None:
        super().__init__()
        inner = (2 * moe.intermediate_size,) if ranks.layout.expert_tensor == 1 else (2, moe.intermediate_size)
        self.gate_up_proj = nn.Parameter(torch.empty(moe.num_experts, *inner, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(moe.num_experts, hidden_size, moe.intermediate_size))

    def forward(self, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert, ``counts_E`` of them each, through their expert: ``[N, D] -> [N, D]``.

        With expert-tensor ranks the result is this rank's part of a sum over them.
        """
        gate_up = local(self.gate_up_proj)
        gate_up_EFD = gate_up if gate_up.ndim == 3 else gate_up.flatten(1, 2)
        hidden_NF = grouped_swiglu(rows_ND, gate_up_EFD, counts_E)
        return grouped_linear(hidden_NF, local(self.down_proj), counts_E)


class MoE(nn.Module):
    """Dropless mixture of experts: every token reaches all of its K experts."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, layer: int, ranks: Ranks, with_bias: bool) -> None:
        super().__init__()
        self.ranks, self.layer = ranks, layer
        self.top_k, self.num_experts, self.renormalize = moe.experts_per_token, moe.num_experts, moe.renormalize
        self.gate = Router(config.hidden_size, moe.num_experts, with_bias)
        self.experts = Experts(config.hidden_size, moe, ranks)

    def forward(self, x_SD: Tensor, routing: Routing | None = None) -> Tensor:
        logits_SE = self.gate(x_SD)
        weights_SK, indices_SK = topk_gate(
            logits_SE,
            self.top_k,
            renormalize=self.renormalize,
            selection_bias_E=self.gate.e_score_correction_bias,
            indices_TK=None if routing is None else routing.recorded.get(self.layer),
        )
        if routing is not None:
            routing.record(self.layer, indices_SK, self.num_experts)
            weights_SK = with_router_losses(weights_SK, logits_SE, indices_SK, routing, self.layer, self.ranks)
            indices_SK = routing.spread_filler(indices_SK, self.num_experts)
        return run_experts(x_SD, weights_SK, indices_SK, self.num_experts, self.experts, self.ranks)
