"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): biased query, key and value projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ARCHITECTURE = "Qwen2ForCausalLM"


def fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The bias is part of the architecture; no key switches it."""
    return {"qkv_bias": True}
