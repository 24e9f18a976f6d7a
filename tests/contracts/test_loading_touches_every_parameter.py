"""After a load every element of every parameter comes from the file, or there was an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, build

from archon.models.config import ModelConfig
from archon.models.decoder import Decoder
from archon.weights import WeightsError, load_folder


def poisoned(folder: Path) -> Decoder:
    model = Decoder(ModelConfig.from_folder(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_element_keeps_what_it_was(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Casting must write through: a cast that makes a copy would leave the parameter at its initial values."""
    build(family).to(dtype).save_pretrained(tmp_path)
    model = poisoned(tmp_path)
    load_folder(model, tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name


@pytest.mark.parametrize("victim", range(0, 60, 7))
def test_any_one_absent_tensor_is_an_error_that_names_it(victim: int, tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = sorted(tensors)[victim % len(tensors)]
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=f"1 missing: {name}"):
        load_folder(poisoned(tmp_path), tmp_path)


def test_quantised_experts_are_refused_instead_of_cast(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=f"more than a cast: {name} .torch.float8_e4m3fn"):
        load_folder(poisoned(tmp_path), tmp_path)
