"""Whether a device's figures can be true: some drivers say that everything is free, whatever is loaded."""

from __future__ import annotations

from typing import Final

from relevo.core.leases.reading import Reading
from relevo.core.units import size_text

BELIEVED_SHARE: Final = 32
"""A used figure below this part of what our holders surely use is not believed."""


class Belief:
    """Judges one device's readings. `reason` is why the newest one is not believed; None: it is."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._has_shown = False  # whether it ever showed a holder's use
        self.reason: str | None = None

    def weigh(self, reading: Reading, sure_bytes: int) -> None:
        """Take a reading. `sure_bytes`: what holders that live are known to use and it must show."""
        used = reading.used_bytes
        if used is None:
            self.reason = None  # nothing is claimed
            return
        total, free = reading.total_bytes or 0, reading.free_bytes or 0
        if free > total:
            self.reason = f"{self._device} reports {size_text(free)} of free memory and has only {size_text(total)}."
        elif used * BELIEVED_SHARE < sure_bytes:
            self.reason = (
                f"{self._device} reports {size_text(used)} in use, while holders that live are known to use "
                f"{size_text(sure_bytes)}."
            )
        elif used or self._has_shown:
            # One that never showed anybody's use is not proven right by its holders' leaving.
            self.reason = None
        if sure_bytes and used * 2 >= sure_bytes:
            self._has_shown = True

    def forget(self) -> None:
        """The figures it was about do not count any more."""
        self.reason = None
