"""torch.compile for one layer, around what depends on the data."""

from __future__ import annotations

import torch
from torch import nn

from archon.models.decoder import DecoderLayer
from archon.models.moe import MoE


def compile_layer(layer: nn.Module, backend: str) -> None:
    """Compile a layer in place, but for attention over documents and experts.

    Their calls depend on the documents of the batch and on the router's choices, so a graph of them would be compiled
    anew for every micro-batch. Methods are compiled and not modules, so that what ``fully_shard`` hooks onto a module
    stays outside the graph.
    """
    assert isinstance(layer, DecoderLayer)
    layer.self_attn.attend = torch.compiler.disable(layer.self_attn.attend)  # type: ignore[method-assign]
    if isinstance(layer.mlp, MoE):
        layer.mlp.forward = torch.compiler.disable(layer.mlp.forward)  # type: ignore[method-assign]
    layer.forward = torch.compile(layer.forward, backend=backend)  # type: ignore[method-assign]
