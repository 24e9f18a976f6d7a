"""Workflows that come with areal; a new one is any class with ``async def run(self, data, **kwargs)``."""

from areal.workflows.multi_turn import MultiTurnWorkflow
from areal.workflows.rlvr import RLVRWorkflow

__all__ = ["MultiTurnWorkflow", "RLVRWorkflow"]
