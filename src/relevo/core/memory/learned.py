"""What real loads and runs taught about memory: the errors of predictions, and what no header tells.

Predictions name their parts; the device shows one sum. From each load three things are told apart: what the driver and
its libraries take (observed after the load, less the engine's own buffers), what pools grew by afterwards (peak less
load), and the residual, which is the error that is left and which the margin has to cover. The peak is the one after
a full micro-batch near a full context; a figure taken after the load alone says less, and is worth less here.

Everything learned belongs to an engine build and a driver. With another of either it does not count any more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from relevo.core.described import Described
from relevo.core.memory.load import DeviceStart
from relevo.core.memory.tier import Tier

MIB: Final = 1 << 20

CARD_FLOORS: Final[Mapping[Tier, int]] = MappingProxyType(
    {Tier.CLOSED_FORM: 512 * MIB, Tier.DRY_RUN: 384 * MIB, Tier.LEARNED: 256 * MIB}
)
"""Margins of a real card are never below these: a failed allocation during decoding ends the worker."""
SMALL_FLOORS: Final[Mapping[Tier, int]] = MappingProxyType(dict.fromkeys(Tier, 32 * MIB))
"""Of the host and of an emulated device, where nothing but the worker's own growth is at stake."""

FEW: Final = 20
"""With fewer residuals than this their spread is not known, so the floor is added to the largest seen."""
PERCENTILE: Final = 99
REMEMBERED_FIRST_S: Final = 900.0
REMEMBERED_MOST_S: Final = 86_400.0
"""How long a failed allocation raises what is held back: each further one of its key doubles the time, up to a day.

A neighbour that was quicker, or a reading that lied, looks like memory in pieces: it is believed, but not for ever.
"""
KEPT_PER_KEY: Final = 128
"""Newest records of one key; enough to tell a 99th percentile from the largest."""

_EXACT: Final = ("weights_bytes", "kv_bytes", "state_bytes", "compute_bytes", "output_bytes", "projector_bytes")
"""The parts of a demand that engines report buffers for."""


class Key(msgspec.Struct, frozen=True):
    """What a record is about: a model, loaded in one way, on one device."""

    model: str
    """Its fingerprint, or the identity of its file."""
    device: str
    options: str
    """The set of options that cost memory, in one spelling."""

    @property
    def text(self) -> str:
        """One string for it, under which the journal keeps its records."""
        return msgspec.json.encode([self.model, self.device, self.options]).decode()


class Circumstances(msgspec.Struct, frozen=True):
    """What must be the same for a record to count."""

    engine_kind: str
    """Engine and backend, as in "llama.cpp CUDA"."""
    engine_build: str
    driver: str


class _Record(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all records."""

    key: Key
    under: Circumstances
    at: float
    """Wall time, seconds since the epoch."""


class Observation(_Record, frozen=True, kw_only=True, tag="observation"):
    """One load, or one run, as it was seen on its device. Figures that were not seen are None."""

    predicted: dict[str, int | None]
    """The demand on the device by part, as it was predicted."""
    reported: dict[str, int] = {}
    """The engine's own buffers on the device, by part."""
    loaded_bytes: int | None = None
    """What the worker held on the device after the load."""
    peak_bytes: int | None = None
    """The most it held, after a full micro-batch near a full context."""
    host_reported_bytes: int | None = None
    """The engine's own buffers in the worker's private memory."""
    host_peak_bytes: int | None = None
    """The most private host memory of the worker."""
    free_bytes: int | None = None
    largest_block_bytes: int | None = None
    """The largest single buffer that could be had while `free_bytes` was free."""


class FailedAllocation(_Record, frozen=True, kw_only=True, tag="failed allocation"):
    """A load was admitted, and the engine did not get one of its buffers."""

    asked_bytes: int
    """The buffer that could not be had, as the engine's error tells it."""
    free_bytes: int | None = None
    """What the device reported as free at that moment."""
    margin_bytes: int = 0
    """The margin that was held back for it."""
    fragmentation_bytes: int = 0
    """What was held back for fragmentation."""

    @property
    def missing_bytes(self) -> int:
        """What was not there; all of the buffer where the free memory is not known. 0: only a block was missing."""
        return self.asked_bytes if self.free_bytes is None else max(0, self.asked_bytes - self.free_bytes)


Record = Observation | FailedAllocation


def encode(record: Record) -> bytes:
    """A record as JSON, for the journal."""
    return msgspec.json.encode(record)


def decode(data: bytes) -> Record:
    """Raises msgspec.DecodeError for what is no record."""
    return msgspec.json.decode(data, type=Record)


class Basis(Described):
    """What a margin rests on, from the surest."""

    KEY = "key", "Earlier loads of this model with these options on this device."
    DEVICE = "device", "Loads of other models on this device."
    ENGINE = "engine", "Loads by this kind of engine on other devices."
    NOTHING = "nothing", "No load was observed yet under this engine build and driver."


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What a load is to be charged beside its predicted parts, as DeviceStart, and how well that is known."""

    context_bytes: int
    pool_bytes: int | None
    """None: the bound of the formula."""
    margin_bytes: int
    fragmentation_bytes: int
    host_context_bytes: int | None
    """Of the worker process itself, on the host; None: not seen yet."""
    tier: Tier
    basis: Basis
    observations: int
    """How many residuals the margin rests on."""
    failures: int
    """How often an allocation of this key failed although it was admitted."""

    @property
    def start(self) -> DeviceStart:
        """In the form that `load_options` takes."""
        return DeviceStart(self.context_bytes, self.pool_bytes, self.margin_bytes)


def margin_bytes(residuals: Sequence[int], floor_bytes: int, raised_bytes: int = 0) -> int:
    """What to hold back for errors like these (observed less predicted).

    The 99th percentile by nearest rank, at least the floor. Fewer than FEW say little about their spread: then the
    largest and the floor. Never below `raised_bytes`, which failures proved to be needed.
    """
    if not residuals:
        return max(floor_bytes, raised_bytes)
    if len(residuals) < FEW:
        margin = floor_bytes + max(0, *residuals)
    else:
        margin = max(floor_bytes, nearest_rank(residuals, PERCENTILE))
    return max(margin, raised_bytes)


def nearest_rank(values: Sequence[int], percent: int) -> int:
    """The smallest value that at least `percent` of all do not exceed. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


class Lessons:
    """All records that are kept, and what follows from them. Costs a pass over the records; asked once a load."""

    def __init__(self, records: Iterable[Record] = (), *, kept_per_key: int = KEPT_PER_KEY) -> None:
        self._kept_per_key = kept_per_key
        self._records: dict[Key, deque[Record]] = {}
        for record in records:
            self.add(record)

    def __len__(self) -> int:
        return sum(len(kept) for kept in self._records.values())

    def add(self, record: Record) -> None:
        """Take in the newest record. The oldest of its key goes when there are too many."""
        self._records.setdefault(record.key, deque(maxlen=self._kept_per_key)).append(record)

    def records(self, under: Circumstances) -> list[Record]:
        """Those that count under these circumstances."""
        return [record for kept in self._records.values() for record in kept if record.under == under]

    def learned(
        self,
        key: Key,
        under: Circumstances,
        *,
        predicted_by: Tier,
        start: DeviceStart,
        floors: Mapping[Tier, int] = CARD_FLOORS,
        now: float | None = None,
    ) -> Learned:
        """What a load of this key is to be charged. `start`: for what this machine has not taught yet.

        `now`: wall time, by which failures of long ago are forgotten; None: all count.

        Where this key's peak was never observed the floor is that of the tier its prediction came from.
        """
        records = _remembered(self.records(under), now)
        seen = [record for record in records if isinstance(record, Observation)]
        own = [record for record in seen if record.key == key]
        failures = [r for r in records if isinstance(r, FailedAllocation) and r.key == key]
        figures = _Figures(seen, start)
        tier = Tier.LEARNED if any(record.peak_bytes is not None for record in own) else predicted_by
        basis, residuals = figures.residuals(key)
        raised = max((f.margin_bytes + f.missing_bytes for f in failures), default=0)
        return Learned(
            context_bytes=figures.context_bytes(key.device),
            pool_bytes=figures.pool_bytes(key),
            margin_bytes=margin_bytes(residuals, floors[tier], raised),
            fragmentation_bytes=_fragmentation_bytes(records),
            host_context_bytes=figures.host_context_bytes(key.device),
            tier=tier,
            basis=basis,
            observations=len(residuals),
            failures=len(failures),
        )


def _remembered(records: list[Record], now: float | None) -> list[Record]:
    """Without failures that are too long ago to count."""
    if now is None:
        return records
    failed: dict[Key, int] = {}
    kept: list[Record] = []
    for record in records:  # of one key the oldest first
        if isinstance(record, FailedAllocation):
            before = failed[record.key] = failed.get(record.key, -1) + 1
            if now - record.at > min(REMEMBERED_FIRST_S * 2.0**before, REMEMBERED_MOST_S):
                continue
        kept.append(record)
    return kept


def residual_bytes(seen: Observation, context_bytes: int, pool_bytes: int) -> int | None:
    """Observed less what would be predicted with this context and pool; None where either is not known.

    Of a run whose peak was not observed it is the load's, to which the pool has not come yet. A part that was not
    predicted is taken as the engine reported it.
    """
    parts = [seen.predicted.get(name, 0) for name in _EXACT]
    parts = [seen.reported.get(name) if part is None else part for name, part in zip(_EXACT, parts, strict=True)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if seen.peak_bytes is not None:
        return seen.peak_bytes - sum(known) - context_bytes - pool_bytes
    return None if seen.loaded_bytes is None else seen.loaded_bytes - sum(known) - context_bytes


class _Figures:
    """What observations under the same circumstances say of devices and of keys; one pass over them."""

    def __init__(self, seen: Sequence[Observation], start: DeviceStart) -> None:
        self._seen = seen
        self._start = start
        self._unaccounted: dict[str, list[int]] = {}  # right after the load, by device
        self._host: dict[str, int] = {}
        self._grown: dict[Key, int] = {}  # from the load to the peak
        for record in seen:
            self._take(record)
        self._context = {device: nearest_rank(found, 50) for device, found in self._unaccounted.items()}

    def _take(self, record: Observation) -> None:
        key, loaded, peak = record.key, record.loaded_bytes, record.peak_bytes
        if loaded is not None and record.reported:
            unaccounted = max(0, loaded - sum(record.reported.values()))
            self._unaccounted.setdefault(key.device, []).append(unaccounted)
        if loaded is not None and peak is not None:
            self._grown[key] = max(self._grown.get(key, 0), peak - loaded)
        if record.host_peak_bytes is not None and record.host_reported_bytes is not None:
            process = record.host_peak_bytes - record.host_reported_bytes
            self._host[key.device] = max(self._host.get(key.device, 0), process)

    def context_bytes(self, device: str) -> int:
        """What is taken there that no engine's buffer accounts for, right after a load: the middle of all."""
        return self._context.get(device, self._start.context_bytes)

    def pool_bytes(self, key: Key) -> int | None:
        """Its own largest growth; else the formula's bound, where there is one, or at least the device's largest."""
        if key in self._grown or self._start.pool_bytes is None:
            return self._grown.get(key)
        on_device = [grown for other, grown in self._grown.items() if other.device == key.device]
        return max([self._start.pool_bytes, *on_device])

    def host_context_bytes(self, device: str) -> int | None:
        """The most of a worker's private host memory that no buffer accounts for."""
        return self._host.get(device)

    def residuals(self, key: Key) -> tuple[Basis, list[int]]:
        """From the nearest records that there are. Each is held against what its own key would be charged now."""
        own = [record for record in self._seen if record.key == key]
        calibrated = [record for record in own if record.peak_bytes is not None]
        near = [record for record in self._seen if record.key.device == key.device]
        for basis, records in (
            (Basis.KEY, calibrated or own),  # a peak says more than what was held after the load
            (Basis.DEVICE, near),
            (Basis.ENGINE, self._seen),
        ):
            each = [
                residual_bytes(record, self.context_bytes(record.key.device), self._grown.get(record.key, 0))
                for record in records
            ]
            found = [residual for residual in each if residual is not None]
            if found:
                return basis, found
        return Basis.NOTHING, []


def _fragmentation_bytes(records: Sequence[Record]) -> int:
    """What this kind of engine needs beyond the sum of its bytes to find room for each buffer.

    Proved by a buffer that could not be had although as much was free, or by the gap between free memory and the
    largest block of it.
    """
    found = [0]
    for record in records:
        if isinstance(record, FailedAllocation):
            if record.free_bytes is not None and record.free_bytes >= record.asked_bytes:
                found.append(record.fragmentation_bytes + record.asked_bytes)
        elif record.free_bytes is not None and record.largest_block_bytes is not None:
            found.append(record.free_bytes - record.largest_block_bytes)
    return max(found)
