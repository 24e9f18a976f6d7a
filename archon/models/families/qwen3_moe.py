"""Qwen3 mixture of experts (arXiv 2505.09388): Qwen3 attention, top-k softmax routing, no shared expert.

On disk each expert has its own ``mlp.experts.<e>.{gate,up,down}_proj.weight``; in memory the experts of a layer are
stacked, as ``archon.weights`` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from archon.models.config import MoEConfig
from archon.models.families import llama

ARCHITECTURE = "Qwen3MoeForCausalLM"


def fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A layer is sparse unless ``mlp_only_layers`` names it or ``decoder_sparse_step`` skips it.

    Raises:
        ValueError: the folder does not say how many experts there are, how large, or how many a token visits.
    """
    num_experts = hf.get("num_experts") or hf.get("num_local_experts")  # the hub's name, transformers 5's name
    sizes: dict[str, Any] = {
        "num_experts": num_experts,
        "num_experts_per_tok": hf.get("num_experts_per_tok"),
        "moe_intermediate_size": hf.get("moe_intermediate_size"),
    }
    for key, value in sizes.items():
        if not value:
            raise ValueError(f"config.json: {key}={value} in a mixture of experts; it must be a positive number")
    if sizes["num_experts_per_tok"] > sizes["num_experts"]:
        raise ValueError(
            f"config.json: num_experts_per_tok={sizes['num_experts_per_tok']} exceeds num_experts={num_experts}"
        )
    step, dense = int(hf.get("decoder_sparse_step", 1)), set(hf.get("mlp_only_layers") or ())
    layers = frozenset(i for i in range(hf["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)
    moe = MoEConfig(
        num_experts=sizes["num_experts"],
        experts_per_token=sizes["num_experts_per_tok"],
        intermediate_size=sizes["moe_intermediate_size"],
        renormalize=bool(hf.get("norm_topk_prob", False)),
        layers=layers,
    )
    attention = {key: value for key, value in llama.fields(hf).items() if key != "mlp_bias"}
    return {**attention, "qk_norm": True, "moe": moe if layers else None}
