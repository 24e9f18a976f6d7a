"""Self-attention over packed documents."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from archon.models.config import ModelConfig
from archon.models.norm import RMSNorm
from archon.models.rope import rotate
from archon_kernels.attention import Documents, packed_attention


@dataclass(frozen=True, eq=False)
class Packing:
    """What every layer needs to know of the batch, computed once per forward.

    One object rather than tensor arguments, so that a mixed-precision wrapper of a layer leaves the fp32 tables alone.

    Attributes:
        cos, sin: ``[T, 1, head_dim]`` fp32 rotary tables.
        documents: borders of the packed documents.
    """

    cos: Tensor
    sin: Tensor
    documents: Documents


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; biases and query-key norms as the config says."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x_TD: Tensor, packing: Packing) -> Tensor:
        """``[T, D] -> [T, D]``; the number of heads follows from the width that the projections return."""
        q, k, v = (
            project(x_TD).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, packing.cos, packing.sin), rotate(k, packing.cos, packing.sin)
        return self.o_proj(packed_attention(q, k, v, packing.documents).flatten(1))
