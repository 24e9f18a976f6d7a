"""Self-attention over packed documents."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from archon.mesh import Ranks
from archon.models.config import ModelConfig
from archon.models.norm import RMSNorm
from archon.parallel.collectives import gather_tokens
from archon.parallel.context import RingDocuments, context_attention
from archon.parallel.tensor import ColumnLinear, local, row_linear
from archon_kernels.attention import Documents
from archon_kernels.rope import rotate


@dataclass(frozen=True, eq=False)
class Packing:
    """What every layer needs to know of the batch, computed once per forward.

    One object rather than tensor arguments, so that a mixed-precision wrapper of a layer leaves the fp32 tables alone.

    Attributes:
        cos, sin: ``[T/c, 1, head_dim]`` fp32 rotary tables of this context rank's tokens.
        documents: borders of the packed documents, of all context ranks.
    """

    cos: Tensor
    sin: Tensor
    documents: Documents | RingDocuments


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; biases and query-key norms as the config says."""

    def __init__(self, config: ModelConfig, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.head_dim = config.head_dim
        self.num_key_value_heads = config.num_key_value_heads
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = ColumnLinear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = ColumnLinear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = ColumnLinear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x_SD: Tensor, packing: Packing) -> Tensor:
        """``[S, D] -> [S, D]``, the S tokens of this rank; this rank's heads see the tokens of all tensor ranks."""
        x_TD = gather_tokens(x_SD, self.ranks.tensor)
        q, k, v = (
            project.unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj(x_TD), self._key_value(self.k_proj, x_TD), self._key_value(self.v_proj, x_TD))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, packing.cos, packing.sin), rotate(k, packing.cos, packing.sin)
        return row_linear(self.o_proj, self.attend(q, k, v, packing).flatten(1), self.ranks)

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, packing: Packing) -> Tensor:
        """``[T/c, H/t, d]``, over the documents of all context ranks."""
        return context_attention(q_THd, k_TGd, v_TGd, packing.documents, self.ranks.context_groups)

    def _key_value(self, linear: ColumnLinear, x_TD: Tensor) -> Tensor:
        """Keys or values of the heads that this rank's queries read."""
        tensor = self.ranks.layout.tensor
        if self.num_key_value_heads % tensor == 0:
            return linear(x_TD)
        head = self.ranks.place.tensor * self.num_key_value_heads // tensor
        rows = slice(head * self.head_dim, (head + 1) * self.head_dim)
        bias = None if linear.bias is None else local(linear.bias)[rows]
        return F.linear(x_TD, local(linear.weight)[rows], bias)
