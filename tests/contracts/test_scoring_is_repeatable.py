"""Two log-prob passes over the same tokens are equal, in training mode too: the decoder has no dropout."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, build, documents, ours_from, pack, predict

from archon.models.config import ModelConfig


@pytest.mark.parametrize("family", FAMILIES)
def test_two_passes_are_equal(family: str) -> None:
    theirs, batch, rows = build(family), pack(documents()), torch.arange(60)
    model = ours_from(theirs).train()
    with_gradient, _ = predict(model, batch, rows)
    recomputed, _ = predict(ours_from(theirs, ac_mode="full").train(), batch, rows)
    with torch.no_grad():
        without, _ = predict(model.eval(), batch, rows)
    assert torch.equal(with_gradient, without) and torch.equal(with_gradient, recomputed)


def test_a_config_with_dropout_is_refused() -> None:
    config = build("llama").config.to_dict()
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        ModelConfig.from_hf_dict({**config, "attention_dropout": 0.1})
