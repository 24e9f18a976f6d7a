"""Qwen3 dense (arXiv 2505.09388): RMS norms on queries and keys, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ARCHITECTURE = "Qwen3ForCausalLM"


def fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A folder without ``head_dim`` means 128, not hidden size over heads."""
    attention_bias = bool(hf.get("attention_bias", False))
    return {
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "qk_norm": True,
        "head_dim": int(hf.get("head_dim") or 128),
    }
