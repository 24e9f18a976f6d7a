"""Dense and mixture-of-experts feed-forward layers (SwiGLU)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from archon.models.config import ModelConfig, MoEConfig
from archon_kernels.grouped_mm import grouped_linear
from archon_kernels.permute import combine, permute, sort_by_expert
from archon_kernels.routing import topk_gate


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class Router(nn.Linear):
    """Expert logits ``[T, E]`` in fp32 whatever the compute dtype: rounding would flip close choices."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self.weight.float())


class Experts(nn.Module):
    """The stacked weights of E SwiGLU experts: ``gate_up_proj [E, 2F, D]`` (gate first), ``down_proj [E, D, F]``."""

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(moe.num_experts, 2 * moe.intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(moe.num_experts, hidden_size, moe.intermediate_size))

    def forward(self, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert, ``counts_E`` of them each, through their expert: ``[N, D] -> [N, D]``."""
        gate, up = grouped_linear(rows_ND, self.gate_up_proj, counts_E).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate) * up, self.down_proj, counts_E)


class MoE(nn.Module):
    """Dropless mixture of experts: every token reaches all of its K experts."""

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.renormalize = moe.experts_per_token, moe.num_experts, moe.renormalize
        self.gate = Router(config.hidden_size, moe.num_experts, bias=False)
        self.experts = Experts(config.hidden_size, moe)

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, indices_TK = topk_gate(self.gate(x_TD), self.top_k, renormalize=self.renormalize)
        order = sort_by_expert(indices_TK, self.num_experts)
        rows_ND = self.experts(permute(x_TD, order), order.counts)
        return combine(rows_ND, weights_TK, order)
