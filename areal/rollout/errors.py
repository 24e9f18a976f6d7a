"""What can go wrong between a prompt and a batch, by name."""

from __future__ import annotations

from typing import Any


class RejectedPrompt(Exception):
    """Raised by a workflow for a prompt that no retry can save; it is dropped at once and counted under ``reason``.

    Args:
        reason: a short stable name such as ``prompt_too_long`` or ``missing_column``, the name of the counter.
        message: what is wrong with this prompt, and what would make it right.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Row(dict[str, Any]):
    """A row of a dataset as workflows see it: asking for a column that it lacks rejects the prompt by name."""

    def __missing__(self, column: str) -> Any:
        raise RejectedPrompt(
            "missing_column", f"the row {self.get('id')!r} has no column {column!r}; it has {', '.join(sorted(self))}"
        )


class InvalidTrajectory(ValueError):
    """A workflow returned something that cannot be trained; the message says what."""


class WorkflowFailure(RuntimeError):
    """The workflow cannot make progress; the message ends with the traceback of the last failed episode.

    Attributes:
        failures: groups that failed in a row, no episode succeeding in between.
        last_traceback: of the last one, empty when nothing raised.
    """

    def __init__(self, message: str, failures: int = 0, last_traceback: str = "") -> None:
        super().__init__(f"{message}\n{last_traceback}".rstrip())
        self.failures = failures
        self.last_traceback = last_traceback


class ExecutorError(RuntimeError):
    """A task of the executor itself failed, or a fatal error reached it; ``__cause__`` is what was raised."""


class RolloutStalled(TimeoutError):
    """Nothing moved for longer than an episode may take; the message lists what was waited for and since when."""


class StalenessViolation(RuntimeError):
    """A batch was formed with a token outside its age bound. It is a defect of the gate, never of the data."""
