"""Whether a load fits: what it takes on its device and on the host, against what is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from relevo.core.events import StartModel
from relevo.core.loads.wish import CPU_ROUTES, DeviceView, Holder, Weigh
from relevo.core.memory.demand import Demand
from relevo.core.units import size_text

_IN_ONE_PIECE: Final = ("weights_bytes", "kv_bytes", "state_bytes", "compute_bytes", "output_bytes", "projector_bytes")
"""Parts that an engine allocates as one buffer each."""


class Load(msgspec.Struct, frozen=True):
    """A start with what it takes. Totals are None where a part is not known.

    Of a CPU route's start, all it takes is under `device`, wherever the weighing put it: the host is its device.
    """

    start: StartModel
    device: Demand
    host: Demand
    device_bytes: int | None
    host_bytes: int | None
    block_bytes: int
    """The largest piece it needs of the device at once."""


class Scales:
    """Weighs starts, each only once: a search comes by the same start again and again.

    `from_storage`: pages of the file that the host maps are not counted, because they can be read again.
    """

    def __init__(self, weigh: Weigh, *, from_storage: bool = False) -> None:
        self._weigh = weigh
        self._from_storage = from_storage
        self._loads: dict[StartModel, Load] = {}

    def __repr__(self) -> str:
        return f"<Scales: {len(self._loads)} starts weighed>"

    def load(self, start: StartModel) -> Load:
        """The start with its demands."""
        known = self._loads.get(start)
        if known is None:
            known = self._loads[start] = self._weighed(start)
        return known

    def _weighed(self, start: StartModel) -> Load:
        device, host = self._weigh(start)
        if start.route in CPU_ROUTES and device.total_bytes == 0:
            device, host = host, device
        of_device, of_host = device.total_bytes, host.total_bytes
        if self._from_storage:
            if start.route in CPU_ROUTES:
                of_device = None if of_device is None else of_device - device.cached_bytes
            of_host = None if of_host is None else of_host - host.cached_bytes
        return Load(start, device, host, of_device, of_host, largest_piece_bytes(device))


class Room(msgspec.Struct, frozen=True):
    """What a load may take at most. None: not known, and then nothing fits."""

    device_bytes: int | None
    block_bytes: int | None
    """The largest piece of the device; None: no smaller than the whole."""
    host_bytes: int | None

    def holds(self, load: Load) -> bool:
        """Whether the load fits, on its device and on the host."""
        excess = self.excess_bytes(load)
        return excess is not None and excess <= 0

    def device_holds(self, load: Load) -> bool:
        """Whether the load's part on the device fits."""
        excess = self.device_excess_bytes(load)
        return excess is not None and excess <= 0

    def excess_bytes(self, load: Load) -> int | None:
        """What the load is too large by, where it is most; at most 0 where it fits; None where that is not known."""
        device, host = self.device_excess_bytes(load), _excess(load.host_bytes, self.host_bytes)
        return None if device is None or host is None else max(device, host)

    def device_excess_bytes(self, load: Load) -> int | None:
        """The same, of its part on the device alone."""
        whole = _excess(load.device_bytes, self.device_bytes)
        if whole is None or self.block_bytes is None:
            return whole
        return max(whole, load.block_bytes - self.block_bytes)

    def with_freed(self, holders: Sequence[Holder]) -> Room:
        """The room once these holders are gone. What each leaves is one piece, at the least."""
        if self.device_bytes is None or not holders:
            return self
        block = self.block_bytes
        if block is not None:
            block = max(block, *(holder.bytes_ for holder in holders))
        freed = sum(holder.bytes_ for holder in holders)
        return msgspec.structs.replace(self, device_bytes=self.device_bytes + freed, block_bytes=block)


def room_of(device: DeviceView, host: DeviceView) -> Room:
    """The room there is now."""
    return Room(device.available_bytes, device.largest_block_bytes, host.available_bytes)


def _excess(need_bytes: int | None, there_bytes: int | None) -> int | None:
    """Unknown stays unknown; but nothing needs nothing, even of a device that is not known."""
    if need_bytes == 0:
        return -(there_bytes or 0)
    return None if need_bytes is None or there_bytes is None else need_bytes - there_bytes


def largest_piece_bytes(demand: Demand) -> int:
    """The largest single buffer that an engine will ask for, as far as it is known."""
    parts = demand.parts()
    return max(parts[name] or 0 for name in _IN_ONE_PIECE)


_WORDS: Final = {
    "weights_bytes": "weights",
    "kv_bytes": "KV",
    "state_bytes": "state",
    "compute_bytes": "compute",
    "output_bytes": "output",
    "projector_bytes": "projector",
    "context_bytes": "driver context",
    "pool_bytes": "pool",
    "fragmentation_bytes": "fragmentation",
    "margin_bytes": "margin",
}


def parts_text(demand: Demand) -> str:
    """The parts that are there, as a list for people."""
    return ", ".join(f"{_WORDS[name]} {size_text(value)}" for name, value in demand.parts().items() if value != 0)


def why_unknown(demand: Demand) -> str | None:
    """Which parts are not known and why, as sentences; None where all are."""
    unknown = [name for name, value in demand.parts().items() if value is None]
    if not unknown:
        return None
    return " ".join(f"Its {_WORDS[name]} is not known: {_reason(demand, name)}" for name in unknown)


def _reason(demand: Demand, name: str) -> str:
    reason = demand.reasons.get(name, "no reason was given.")
    return reason if reason.endswith(".") else f"{reason}."


def why_not(load: Load, room: Room, device: DeviceView, host: DeviceView) -> str:
    """Why the load does not fit, in a sentence with its numbers."""
    name = load.start.model
    for demand, view, there, need in (
        (load.device, device, room.device_bytes, load.device_bytes),
        (load.host, host, room.host_bytes, load.host_bytes),
    ):
        if need == 0:
            continue
        if need is None:
            return f"What {name} needs of {view.name} is not known. {why_unknown(demand)}"
        if there is None:
            return f"What is free on {view.name} is not known. {view.reason or 'No reason was given.'}"
        if need > there:
            needs = f"{name} needs {size_text(need)} of {view.name} ({parts_text(demand)})"
            return f"{needs}, and {size_text(there)} is available: {size_text(need - there)} too little."
    if room.block_bytes is not None and load.block_bytes > room.block_bytes:
        return (
            f"{name} needs {size_text(load.block_bytes)} of {device.name} in one piece, "
            f"and the largest free one is {size_text(room.block_bytes)}."
        )
    return f"{name} fits."
