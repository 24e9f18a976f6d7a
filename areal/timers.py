"""When something periodic is due: every so many epochs, steps or seconds."""

from __future__ import annotations

import time


class Timer:
    """Due when any of the given frequencies has elapsed since it last fired; never, when none is given.

    Args:
        freq_epochs, freq_steps, freq_secs: None turns that frequency off.
        steps_per_epoch: training steps of one epoch.
    """

    def __init__(
        self, freq_epochs: int | None, freq_steps: int | None, freq_secs: float | None, *, steps_per_epoch: int
    ) -> None:
        periods = [freq_steps, freq_epochs * steps_per_epoch if freq_epochs else None]
        self._periods = [period for period in periods if period]
        self._seconds = freq_secs
        self._fired = time.monotonic()

    def due(self, step: int) -> bool:
        """Ask once per completed step (counted from 1)."""
        late = self._seconds is not None and time.monotonic() - self._fired >= self._seconds
        if late or any(step % period == 0 for period in self._periods):
            self._fired = time.monotonic()
            return True
        return False
