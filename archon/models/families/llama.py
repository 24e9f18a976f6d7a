"""Llama 2 and 3, SmolLM2 and others of that architecture (arXiv 2307.09288, 2407.21783): the plain decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ARCHITECTURE = "LlamaForCausalLM"


def fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Biases are optional, and off in all published Llama models."""
    attention_bias = bool(hf.get("attention_bias", False))
    return {"qkv_bias": attention_bias, "o_bias": attention_bias, "mlp_bias": bool(hf.get("mlp_bias", False))}
