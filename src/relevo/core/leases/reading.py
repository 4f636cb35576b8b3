"""What a device says of its memory."""

from __future__ import annotations

import msgspec


class Reading(msgspec.Struct, frozen=True):
    """What a device says of its memory at one moment. Unknown figures are None, with the reason."""

    total_bytes: int | None
    free_bytes: int | None
    driver_reserved_bytes: int = 0
    read_at: float = 0.0
    """Monotonic seconds."""
    reason: str | None = None
    """Why a figure is None."""
    free_at_most_bytes: int | None = None
    """Where free_bytes is None: what it cannot exceed. It may lower what is available, and never proves any."""
    largest_block_bytes: int | None = None
    """The largest single buffer that could be had. None: the device does not tell."""

    @property
    def used_bytes(self) -> int | None:
        """Everybody's use together, without what the driver keeps for itself."""
        if self.total_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.driver_reserved_bytes)
