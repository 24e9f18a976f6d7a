"""Training state on disk: sharded by torch.distributed.checkpoint, complete or absent, bit-exact on resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from archon.folders import new_folder

_STATE = "state.json"


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    """Write model, optimizer and ``state`` (JSON values) to ``path``, atomically: kill -9 leaves the old or the new.

    An existing checkpoint under ``path`` is replaced.
    """
    with new_folder(path) as work:
        dcp.save(_state_dict(model, optimizer), checkpoint_id=work)
        (work / _STATE).write_text(json.dumps(state))


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Restore model and optimizer in place and return the JSON state.

    Raises:
        FileNotFoundError: ``path`` holds no complete checkpoint.
    """
    if not is_checkpoint(path):
        raise FileNotFoundError(f"{path} holds no complete checkpoint ({_STATE} is missing)")
    tensors = _state_dict(model, optimizer)
    dcp.load(tensors, checkpoint_id=path)
    optimizers = (optimizer,) if optimizer else ()
    set_state_dict(model, optimizers, model_state_dict=tensors["model"], optim_state_dict=tensors.get("optimizer", {}))
    return json.loads((path / _STATE).read_text())


def is_checkpoint(path: Path) -> bool:
    return (path / _STATE).is_file()


def _state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, (optimizer,) if optimizer else ())
    return {"model": model_state, "optimizer": optimizer_state} if optimizer else {"model": model_state}
