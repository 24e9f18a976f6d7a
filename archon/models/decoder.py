"""The decoder: a causal language model over packed documents, with the parameter names of Hugging Face models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from archon.models.attention import Attention, Packing
from archon.models.config import ModelConfig
from archon.models.moe import MLP, Experts, MoE
from archon.models.norm import RMSNorm
from archon.models.rope import cos_sin
from archon_kernels.attention import Documents
from archon_kernels.linear_logprob import linear_logprob


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        sparse = config.moe is not None and index in config.moe.layers
        self.mlp: nn.Module = MoE(config, config.moe) if sparse and config.moe is not None else MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, packing: Packing) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), packing)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, packing: Packing, recompute: bool) -> Tensor:
        x_TD = self.embed_tokens(input_ids)
        for layer in self.layers:
            if recompute and torch.is_grad_enabled():
                x_TD = checkpoint(layer, x_TD, packing, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TD = layer(x_TD, packing)
        return self.norm(x_TD)


class Decoder(nn.Module):
    """A causal language model. ``lm_head`` exists only where the config does not tie it to the embedding.

    Parameters are uninitialised on construction (the meta device works): load a folder or call ``init_weights``.

    Attributes:
        recompute: run each layer again in backward instead of keeping its activations.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        self.model = Backbone(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        *,
        rows: Tensor | None = None,
        targets: Tensor | None = None,
        temperature: Tensor | None = None,
        with_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Hidden states of all tokens or, given ``rows``, log-probabilities after the chosen ones.

        The LM head is used inside this call only, so a wrapper that gathers parameters around the root's forward works.

        Args:
            input_ids: ``[T]`` int64.
            position_ids: ``[T]`` int64 position inside the document.
            cu_seqlens: ``[N+1]`` int64 document borders.
            rows: ``[M]`` int64 positions whose prediction matters; may be empty.
            targets: ``[T]`` int64, the token that follows each position; read at ``rows`` only.
            temperature: ``[T]`` fp32 that divides the logits of each position, or None for 1; read at ``rows`` only.
            with_entropy: also return the entropy of the predictions.

        Returns:
            ``hidden [T, D]`` after the final norm in the compute dtype, when ``rows`` is None; else
            ``(logprobs [M], entropy [M] or None)`` in fp32 nats.

        Raises:
            ValueError: ``rows`` without ``targets``.
            TypeError: a temperature in less than fp32.
        """
        cos, sin = cos_sin(self.config.rope, self.config.head_dim, position_ids)
        packing = Packing(cos, sin, Documents.from_cu_seqlens(cu_seqlens))
        hidden_TD = self.model(input_ids, packing, self.recompute)
        if rows is None:
            return hidden_TD
        if targets is None:
            raise ValueError("rows without targets: pass the token that follows each position")
        return self.logprobs(
            hidden_TD.index_select(0, rows),
            targets[rows],
            None if temperature is None else temperature[rows],
            with_entropy,
        )

    def head_weight(self) -> Tensor:
        """``[V, D]`` LM head, which is the embedding where the config ties them."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def logprobs(
        self, hidden_MD: Tensor, targets_M: Tensor, temperature: Tensor | None = None, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies ``[M]`` fp32 of targets after hidden states; see ``linear_logprob``."""
        if temperature is not None and temperature.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"temperature is {temperature.dtype}, it must be float32; under FSDP set cast_forward_inputs=False, "
                "or the wrapper rounds it"
            )
        return linear_logprob(
            hidden_MD, self.head_weight(), targets_M, temperature=temperature, with_entropy=with_entropy
        )

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw matrices from a normal of width ``initializer_range``; biases become 0 and norms 1."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, nn.Linear | nn.Embedding | Experts):
                for name, parameter in module.named_parameters(recurse=False):
                    if name == "bias":
                        parameter.zero_()
                    else:
                        parameter.normal_(0.0, self.config.initializer_range, generator=generator)
