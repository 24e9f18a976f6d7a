"""Choosing an implementation."""

from __future__ import annotations

import pytest
import torch

from archon_kernels import extension
from archon_kernels.dispatch import choose
from archon_kernels.routing import topk_gate

CPU = torch.device("cpu")
ALL = {"reference": "plain", "cpp": "built", "triton": "compiled"}


def test_the_cpu_runs_cpp_and_falls_back_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARCHON_KERNELS", raising=False)
    assert choose({"reference": "plain"}, CPU) == "plain"
    assert choose(ALL, CPU) == "built"
    monkeypatch.setattr(extension, "load", lambda: False)
    assert choose(ALL, CPU) == "plain"


def test_the_environment_names_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", "reference")
    assert choose(ALL, CPU) == "plain"
    monkeypatch.setenv("ARCHON_KERNELS", "cpp")
    assert choose({"reference": "plain"}, CPU) == "plain"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("ARCHON_KERNELS", "triton")
    with pytest.raises(ValueError, match=r"ARCHON_KERNELS=triton: .*TRITON_INTERPRET=1.*on cpu"):
        choose(ALL, CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose(ALL, CPU) == "compiled"


def test_an_unknown_implementation_is_refused_by_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_KERNELS", "referense")
    with pytest.raises(ValueError, match=r"ARCHON_KERNELS='referense'.*reference"):
        topk_gate(torch.randn(2, 3), 1, renormalize=False)
