"""ModelConfig: what the decoder needs to know, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies: ``kind`` is default, linear (positions divided by ``factor``) or llama3 (Llama 3.1)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_hf_dict(cls, hf: Mapping[str, Any]) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (older folders).

        Raises:
            ValueError: a kind of scaling, or a partial rotation, that the decoder does not have.
        """
        # Of the two, transformers lets rope_scaling win where a folder holds both.
        parameters = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind not in ("default", "linear", "llama3"):
            raise ValueError(f"config.json: rope type {kind!r} is not supported; supported are default, linear, llama3")
        partial = parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
        if partial not in (None, 1.0):
            raise ValueError(f"config.json: partial_rotary_factor={partial} is not supported; only 1.0 is")
        theta = float(parameters.get("rope_theta") or hf.get("rope_theta") or 10_000.0)
        if kind == "default":
            return cls(theta)
        if kind == "linear":
            return cls(theta, kind, factor=float(_require(parameters, "factor", "rope_parameters.")))
        original = (
            hf.get("original_max_position_embeddings")
            or parameters.get("original_max_position_embeddings")
            or hf.get("max_position_embeddings")
        )
        return cls(
            theta,
            kind,
            factor=float(_require(parameters, "factor", "rope_parameters.")),
            low_freq_factor=float(_require(parameters, "low_freq_factor", "rope_parameters.")),
            high_freq_factor=float(_require(parameters, "high_freq_factor", "rope_parameters.")),
            original_max_position_embeddings=int(original or cls.original_max_position_embeddings),
        )


@dataclass(frozen=True)
class MoEConfig:
    """Experts of the sparse layers. ``layers`` holds the indices of the layers that have them; the others are dense."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalize: bool
    layers: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one decoder. Sizes are counts of units; names follow ``config.json`` where it has them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config.json: num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"config.json: head_dim={self.head_dim} is odd; rotary embeddings need an even one")

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read ``<path>/config.json``.

        Raises:
            FileNotFoundError: the folder has no ``config.json``.
            ValueError: the file is no model config, or names a feature that the decoder does not have.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{path} is no model folder: it has no config.json")
        try:
            hf = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is no JSON: {error}") from error
        return cls.from_hf_dict(hf)

    @classmethod
    def from_hf_dict(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Build from the content of a ``config.json``.

        Raises:
            ValueError: a key is missing, or asks for a feature that the decoder does not have; the message names it.
        """
        from archon.models.families import family_of  # families build on this module

        family = family_of(hf)
        _refuse_unsupported(hf)
        heads, hidden_size = int(_require(hf, "num_attention_heads")), int(_require(hf, "hidden_size"))
        fields: dict[str, Any] = {
            "model_type": hf["model_type"],
            "vocab_size": int(_require(hf, "vocab_size")),
            "hidden_size": hidden_size,
            "intermediate_size": int(_require(hf, "intermediate_size")),
            "num_hidden_layers": int(_require(hf, "num_hidden_layers")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(hf.get("num_key_value_heads") or heads),
            "head_dim": int(hf.get("head_dim") or hidden_size // heads),
            "max_position_embeddings": int(_require(hf, "max_position_embeddings")),
            "rope": RopeConfig.from_hf_dict(hf),
            "rms_norm_eps": float(hf.get("rms_norm_eps", cls.rms_norm_eps)),
            "initializer_range": float(hf.get("initializer_range", cls.initializer_range)),
            "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        }
        return cls(**{**fields, **family.fields(hf)})


def _require(hf: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    if hf.get(key) is None:
        raise ValueError(f"config.json: the key {prefix}{key} is missing")
    return hf[key]


_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "dual_chunk_attention_config": (None,),
}
"""Keys that change the maths, and the values of them that the decoder implements."""


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    for key, allowed in _ONLY.items():
        if key in hf and hf[key] not in allowed:
            raise ValueError(f"config.json: {key}={hf[key]!r} is not supported; supported: {allowed[0]!r}")
    kinds = set(hf.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ValueError(f"config.json: layer_types holds {sorted(kinds)}; only full_attention is supported")
