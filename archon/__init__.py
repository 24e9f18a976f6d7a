"""Archon: a training engine for large language models, above all mixture-of-experts models."""

from archon.batch import PackedBatch
from archon.engine import Engine
from archon.layout import Layout
from archon.losses import Loss, LossFn, LossSpec, TokenOutputs
from archon.optim import OptimizerConfig
from archon.options import Options

__all__ = [
    "Engine",
    "Layout",
    "Loss",
    "LossFn",
    "LossSpec",
    "OptimizerConfig",
    "Options",
    "PackedBatch",
    "TokenOutputs",
]
