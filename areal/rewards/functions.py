"""Reward functions as values: their names, how they travel to another process, and what they may return."""

from __future__ import annotations

import importlib
import inspect
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

RewardFunction = Callable[..., Any]
"""``(prompt, completion, prompt_ids, completion_ids, **data) -> float``, plain or a coroutine function."""


class RewardError(RuntimeError):
    """A reward function gave no score; the message names it and holds the traceback of what it raised."""


class RewardTimeout(RewardError):
    """A reward function ran past its deadline and was killed."""


class RewardWorkerDied(RewardError):
    """The process that ran a reward function ended without an answer."""


def import_function(path: str) -> RewardFunction:
    """The callable at ``package.module.name`` or ``package.module:Class.method``.

    Raises:
        RewardError: no such module or name, or it is not callable. What the module raises on import passes through.
    """
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise RewardError(
            f"reward function {path!r} not found ({error}); write package.module.function of an importable module"
        ) from error
    if not callable(value):
        raise RewardError(f"reward {path!r} is a {type(value).__name__}, not a function")
    return value


def name_of(function: RewardFunction | str) -> str:
    """How errors name a reward function."""
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', type(function).__module__)}.{name}"


def is_coroutine_function(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def dump_function(function: RewardFunction | str) -> bytes:
    """An importable function as its import path, any other (``__main__``, notebook cell, closure, object) by value."""
    if isinstance(function, str):
        return pickle.dumps(function)
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module not in (None, "__main__") and "<" not in name:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is function:
            return pickle.dumps(f"{module}:{name}")
    import cloudpickle

    return cloudpickle.dumps(function)


def load_function(blob: bytes) -> RewardFunction:
    """The inverse of ``dump_function``."""
    value = pickle.loads(blob)
    return import_function(value) if isinstance(value, str) else value


def as_score(value: Any, name: str) -> float:
    """The number a reward function returned; 0.0 is a score.

    Raises:
        RewardError: not a number (text is none), or not finite.
    """
    if isinstance(value, int | float) or hasattr(value, "__float__"):
        try:
            score = float(value)
        except (TypeError, ValueError) as error:
            raise RewardError(f"reward function {name} returned {value!r}, which is not one number") from error
        if math.isfinite(score):
            return score
        raise RewardError(f"reward function {name} returned {score}; a reward is a finite number")
    raise RewardError(f"reward function {name} returned {value!r}, a {type(value).__name__}; return one number")
