"""One clock: the caller's deadline, carried through every layer. No layer has a limit of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from weightlink.hooks.errors import ConfigError, DeadlineExceeded


@dataclass(frozen=True)
class Deadline:
    """A point on this process's monotonic clock. Crosses processes as the seconds that remain."""

    at: float
    budget: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline ``seconds`` from now; raises :class:`ConfigError` unless positive and finite."""
        if not 0 < seconds < float("inf"):
            raise ConfigError("a timeout must be a positive, finite number of seconds", found=seconds)
        return cls(time.monotonic() + seconds, seconds)

    def remaining(self) -> float:
        """Seconds left, 0.0 when it has passed."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return self.remaining() <= 0.0

    def check(self, waiting_for: str, *, rank: str = "") -> float:
        """Seconds left; raises :class:`DeadlineExceeded` naming ``waiting_for`` when none are."""
        left = self.remaining()
        if left <= 0.0:
            raise self.exceeded(waiting_for, rank=rank)
        return left

    def exceeded(self, waiting_for: str, *, rank: str = "") -> DeadlineExceeded:
        """The error to raise when the wait for ``waiting_for`` ran out."""
        return DeadlineExceeded(
            f"deadline of {self.budget:g} s passed while waiting for {waiting_for}",
            rank=rank,
            remedy="pass a longer timeout=, or look at the process that was waited for",
        )

    def timedelta(self, waiting_for: str) -> timedelta:
        """The remaining time for torch's APIs, at least one millisecond; raises when none is left."""
        return timedelta(seconds=max(0.001, self.check(waiting_for)))
