"""Which run a configuration describes: what a resume must find unchanged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from areal.config import ArchonConfig, Config
from areal.rewards.functions import name_of
from areal.rollout.workflow import Workflow

_MAY_CHANGE_ON_RESUME: dict[str, Any] = {
    "saver": True,
    "evaluator": True,
    "recover": True,
    "stats_logger": True,
    "cluster": True,
    "actor": {
        # Where and how it is computed; what is computed does not depend on it.
        "backend": True,
        "request_timeout": True,
        "mb_spec": True,
        "gradient_checkpointing": True,
        "archon": set(ArchonConfig.model_fields) - {"moe_aux_loss_coeff", "moe_z_loss_coeff"},
    },
    "rollout": {
        "num_threads",
        "reward_workers",
        "reward_timeout",
        "episode_timeout",
        "setup_timeout",
        "max_concurrent_rollouts",
    },
}


def config_digest(config: Config, workflow: Workflow | None = None, reward_fn: Callable[..., Any] | None = None) -> str:
    """Identifies a run: every key that a resume must not change, and the objects in place of keys, by name."""
    objects = [type(workflow).__qualname__ if workflow else None, name_of(reward_fn) if reward_fn else None]
    return hashlib.sha256(json.dumps([_identity(config), objects], sort_keys=True).encode()).hexdigest()[:16]


def changed_keys(old: Config, new: Config) -> list[str]:
    """Dotted keys whose values differ and that a resume must not change."""

    def walk(prefix: str, a: Any, b: Any) -> Iterator[str]:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted(a.keys() | b.keys()):
                yield from walk(f"{prefix}.{key}", a.get(key), b.get(key))
        elif a != b:
            yield prefix.lstrip(".")

    return list(walk("", _identity(old), _identity(new)))


def _identity(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude=_MAY_CHANGE_ON_RESUME)
