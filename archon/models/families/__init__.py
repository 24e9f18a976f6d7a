"""Model families: what differs between architectures, one file each. The registry is keyed by ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from archon.models.families import llama, qwen2, qwen3, qwen3_moe


class Family(Protocol):
    """A module of this package."""

    ARCHITECTURE: str
    """The entry of ``architectures`` in ``config.json``."""

    def fields(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of ModelConfig that differ from the plain decoder, from the content of a ``config.json``."""
        ...


FAMILIES: dict[str, Family] = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe}


def critic_architecture(family: Family) -> str:
    """What ``architectures`` says of a critic of the family: the decoder with a ``score`` in the place of the head."""
    return family.ARCHITECTURE.replace("ForCausalLM", "ForSequenceClassification")


def family_of(hf: Mapping[str, Any]) -> Family:
    """The family of a ``config.json``.

    Raises:
        ValueError: an unknown ``model_type``, or an architecture that is no causal language model or critic of it.
    """
    model_type = hf.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"config.json: model_type={model_type!r} is not supported; supported: {sorted(FAMILIES)}")
    family = FAMILIES[model_type]
    architectures = hf.get("architectures") or [family.ARCHITECTURE]
    if not {family.ARCHITECTURE, critic_architecture(family)} & set(architectures):
        raise ValueError(
            f"config.json: architectures={architectures} is not supported; supported: {family.ARCHITECTURE}"
        )
    return family
