"""The decoder: a causal language model over packed documents, with the parameter names of Hugging Face models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from archon.mesh import SINGLE, Ranks
from archon.models.attention import Attention, Packing
from archon.models.config import ModelConfig
from archon.models.moe import MLP, Experts, MoE
from archon.models.norm import RMSNorm
from archon.models.rope import cos_sin
from archon.options import Options
from archon.parallel.collectives import gather_outputs, gather_tokens, scatter_tokens
from archon.parallel.context import context_documents
from archon.parallel.expert import Routing
from archon.parallel.recompute import LayerPlan, plan_recompute, run_layer
from archon.parallel.tensor import assign, local
from archon_kernels.linear_logprob import linear_logprob


@dataclass(frozen=True)
class Part:
    """The layers of a decoder that one pipeline stage holds; the first has the embedding, the last norm and head."""

    layers: range
    first: bool
    last: bool

    @classmethod
    def whole(cls, config: ModelConfig) -> Part:
        return cls(range(config.num_hidden_layers), first=True, last=True)


@dataclass(frozen=True, eq=False)
class Head:
    """What the head computes, from the hidden states of this context rank's tokens.

    Attributes:
        rows: ``[M]`` int64 tokens whose prediction matters, each once; may be empty. Values come for every token.
        targets: ``[M]`` int64, the token that follows each of them.
        temperature: ``[M]`` fp32 that divides their logits, or None for 1.
        outputs: columns to return: ``logprobs``, ``entropy``; or ``values`` of a critic.
    """

    rows: Tensor
    targets: Tensor
    temperature: Tensor | None = None
    outputs: tuple[str, ...] = ("logprobs",)


class Embedding(nn.Embedding):
    """Token embedding of which each tensor rank holds consecutive rows: ids ``[T]`` to ``[T/t, D]``."""

    def __init__(self, config: ModelConfig, ranks: Ranks) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.ranks = ranks

    def forward(self, input: Tensor) -> Tensor:
        weight = local(self.weight)
        if self.ranks.tensor is None:
            return F.embedding(input, weight)
        row = input - self.ranks.place.tensor * weight.shape[0]
        mine = (row >= 0) & (row < weight.shape[0])
        rows = F.embedding(torch.where(mine, row, 0), weight)
        return scatter_tokens(torch.where(mine.unsqueeze(-1), rows, 0), self.ranks.tensor)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, ranks: Ranks, options: Options) -> None:
        super().__init__()
        self.self_attn = Attention(config, ranks)
        with_bias = options.moe_router_bias_update_rate > 0
        sparse = config.moe is not None and index in config.moe.layers
        self.mlp: nn.Module = (
            MoE(config, config.moe, index, ranks, with_bias)
            if sparse and config.moe is not None
            else MLP(config, ranks)
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_SD: Tensor, packing: Packing, routing: Routing | None = None) -> Tensor:
        x_SD = x_SD + self.self_attn(self.input_layernorm(x_SD), packing)
        return x_SD + self.mlp(self.post_attention_layernorm(x_SD), routing)


class Backbone(nn.Module):
    """Embedding, layers and final norm, or the part of them that a pipeline stage holds."""

    def __init__(
        self, config: ModelConfig, part: Part, ranks: Ranks, options: Options, *, embedding_is_head: bool
    ) -> None:
        super().__init__()
        self.part = part
        if part.first or (part.last and embedding_is_head):
            self.embed_tokens = Embedding(config, ranks)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(config, index, ranks, options) for index in part.layers})
        if part.last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, packing: Packing, routing: Routing | None, recompute: LayerPlan) -> Tensor:
        x_SD = self.embed_tokens(x) if self.part.first else x
        for index, layer in self.layers.items():
            x_SD = run_layer(recompute.get(int(index)), layer, x_SD, packing, routing)
        return self.norm(x_SD) if self.part.last else x_SD


class Decoder(nn.Module):
    """A causal language model, or a pipeline stage of one, as one rank of a layout computes it.

    ``lm_head`` exists only where the config does not tie it to the embedding; a critic has ``score`` in its place.
    Parameters are uninitialised on construction (the meta device works): load a folder or call ``init_weights``.

    Args:
        config: the model's shape.
        part: the layers to hold; None for all.
        ranks: the place of this process in a layout.
        options: what backward recomputes, and whether routers have a balance bias.
        is_critic: predict a value instead of a token.
    """

    def __init__(
        self,
        config: ModelConfig,
        part: Part | None = None,
        *,
        ranks: Ranks = SINGLE,
        options: Options | None = None,
        is_critic: bool = False,
    ) -> None:
        super().__init__()
        options = options or Options()
        self.config, self.ranks, self.is_critic = config, ranks, is_critic
        self.part = part or Part.whole(config)
        self.recompute = plan_recompute(options, config)
        embedding_is_head = config.tie_word_embeddings and not is_critic
        self.model = Backbone(config, self.part, ranks, options, embedding_is_head=embedding_is_head)
        if self.part.last and is_critic:
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        elif self.part.last and not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        *,
        head: Head | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Hidden states of the tokens or, given ``head``, what the head makes of them.

        A context rank has ``T/c`` of the T packed tokens, and a tensor rank ``S = T/(c*t)`` of them between the blocks.
        The head is used inside this call only, so a wrapper that gathers parameters around the root's forward works.

        Args:
            x: ``[T/c]`` int64 token ids or, behind the first stage, hidden states ``[S, D]``.
            position_ids: ``[T/c]`` int64 position inside the document.
            cu_seqlens: ``[N+1]`` int64 document borders in the T tokens.
            head: what to compute on the last stage.
            routing: what the routers read and write.

        Returns:
            Hidden states ``[S, D]`` in the compute dtype, after the final norm on the last stage, when there is no
            ``head`` or a later stage; else the columns of ``head.outputs``, ``[C, T/c]`` fp32. Entry r of a column is
            what the hidden state of token r predicts, and 0 where ``head.rows`` does not ask for it.
        """
        cos, sin = cos_sin(self.config.rope, self.config.head_dim, position_ids)
        tokens = position_ids.shape[0] * self.ranks.layout.context
        documents = context_documents(cu_seqlens, tokens, self.ranks.context_groups)
        hidden_SD = self.model(x, Packing(cos, sin, documents), routing, self.recompute)
        if head is None or not self.part.last:
            return hidden_SD
        return self._values(hidden_SD) if self.is_critic else self._predictions(hidden_SD, head)

    def head_weight(self) -> Tensor:
        """LM head ``[V, D]``, which is the embedding where the config ties them; ``[V/t, D]`` of a tensor rank."""
        return local(self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight)

    def _predictions(self, hidden_SD: Tensor, head: Head) -> Tensor:
        if head.temperature is not None and head.temperature.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"temperature is {head.temperature.dtype}, it must be float32; under FSDP set "
                "cast_forward_inputs=False, or the wrapper rounds it"
            )
        hidden_TD = gather_tokens(hidden_SD, self.ranks.tensor)
        weight = self.head_weight()
        found = linear_logprob(
            hidden_TD.index_select(0, head.rows),
            weight,
            head.targets,
            temperature=head.temperature,
            with_entropy="entropy" in head.outputs,
            vocab_start=self.ranks.place.tensor * weight.shape[0],
            group=self.ranks.tensor,
        )
        blank = hidden_TD.new_zeros(hidden_TD.shape[0], dtype=found.logprobs.dtype)
        return torch.stack([blank.index_put((head.rows,), getattr(found, name)) for name in head.outputs])

    def _values(self, hidden_SD: Tensor) -> Tensor:
        values_S1 = F.linear(hidden_SD.float(), local(self.score.weight).float())
        return torch.stack([gather_outputs(values_S1.squeeze(-1), self.ranks.tensor)])

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Set the parameters to ``initial_weights``."""
        parameters = dict(self.named_parameters())
        for name, whole in initial_weights(self.config, generator, is_critic=self.is_critic):
            if name in parameters:
                assign(parameters[name], whole)


def initial_weights(
    config: ModelConfig, generator: torch.Generator | None = None, *, is_critic: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Stream (name in memory, fp32 tensor): matrices from a normal of width ``initializer_range``, biases 0, norms 1.

    The same generator gives the same weights whatever the layout, because every tensor is drawn whole and in order.
    """
    device = generator.device if generator is not None else torch.device("cpu")
    with torch.device("meta"):
        model = Decoder(config, is_critic=is_critic)
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            whole = torch.empty(parameter.shape, device=device)
            if isinstance(module, RMSNorm):
                whole.fill_(1.0)
            elif isinstance(module, nn.Linear | nn.Embedding | Experts) and name != "bias":
                whole.normal_(0.0, config.initializer_range, generator=generator)
            else:
                whole.zero_()
            yield f"{prefix}.{name}", whole
