"""Two log-prob passes over the same tokens are equal, in training mode too: the decoder has no dropout."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, build, documents, pack

from archon.models.config import ModelConfig
from archon.models.decoder import Decoder
from archon.weights import load_named, named_weights


@pytest.mark.parametrize("family", FAMILIES)
def test_two_passes_are_equal(family: str) -> None:
    theirs = build(family)
    model = Decoder(ModelConfig.from_hf_dict(theirs.config.to_dict())).train()
    load_named(model, named_weights(theirs))
    batch = pack(documents())
    arguments = {"rows": torch.arange(60), "targets": batch[0].roll(-1)}
    with_gradient, _ = model(*batch, **arguments)
    model.recompute = True
    recomputed, _ = model(*batch, **arguments)
    with torch.no_grad():
        without, _ = model.eval()(*batch, **arguments)
    assert torch.equal(with_gradient, without) and torch.equal(with_gradient, recomputed)


def test_a_config_with_dropout_is_refused() -> None:
    config = build("llama").config.to_dict()
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        ModelConfig.from_hf_dict({**config, "attention_dropout": 0.1})
