"""A device's memory as it is shown to people."""

from __future__ import annotations

import msgspec

from relevo.core.leases.lease import Holding
from relevo.core.leases.pressure import PressureStage


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    """A device's memory, for the status page. Never decided on."""

    device: str
    total_bytes: int | None
    driver_reserved_bytes: int | None
    reported_free_bytes: int | None
    leased_bytes: int
    granted_not_visible_bytes: int
    """The part of the leases that the reported free memory may still contain."""
    returning_bytes: int
    """Of released leases: their process is gone, and the device has not shown the bytes back yet."""
    unverified_bytes: int
    external_bytes: int | None
    available_bytes: int | None
    headroom_bytes: int | None
    slack_bytes: int | None
    """Free by the smaller of report and promise, headroom included. Negative: there is less than is promised."""
    largest_block_bytes: int | None
    pressure: float | None
    stage: PressureStage
    stage_reason: str | None
    """Why the stage is unknown."""
    read_at: float | None
    reason: str | None
    """Why the figures that are None are not known."""
    disbelief: str | None
    """Why the reported figures are not believed; then only what was promised is decided on."""
    leases: tuple[Holding, ...]
