"""The asynchronous reinforcement-learning controller around Archon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.trainer import Result, Trainer

__all__ = ["Result", "Trainer"]


def __getattr__(name: str) -> Any:
    """Import the trainer when it is asked for: reward workers and ``--help`` need none of it."""
    if name in __all__:
        from areal import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
