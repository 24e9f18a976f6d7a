"""Choosing an implementation."""

from __future__ import annotations

import pytest
import torch

from archon_kernels.dispatch import choose
from archon_kernels.routing import topk_gate


def test_the_environment_names_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARCHON_KERNELS", raising=False)
    assert choose({"reference": 1}) == 1
    monkeypatch.setenv("ARCHON_KERNELS", "reference")
    assert choose({"reference": 1}) == 1


def test_an_unknown_implementation_is_refused_by_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", "referense")
    with pytest.raises(ValueError, match=r"ARCHON_KERNELS='referense'.*reference"):
        topk_gate(torch.randn(2, 3), 1, renormalize=False)
