"""From each real load and run to the next prediction: what was observed goes to the journal, and comes back as margins.

The arithmetic is core's (`learned.py`); here is what is looked at, when, and under which key it is kept.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from relevo.core.breaker import FaultKind
from relevo.core.events import Ready, StartModel
from relevo.core.memory.learned import (
    Circumstances,
    FailedAllocation,
    Key,
    Learned,
    Lessons,
    Observation,
    Record,
    decode,
    encode,
)
from relevo.core.memory.tier import Tier
from relevo.journal import AddMeasurement, Journal
from relevo.replicas.death import Death
from relevo.service.berths import Berth, HeldDevice, Life
from relevo.service.records import log_failure
from relevo.service.scales import Place, first_charge, same_load

_log = logging.getLogger("relevo.learning")

PEAK_STEP_BYTES = 1 << 20
"""A peak that grew by less is not written down again."""
KNOWN_FOR_S = 60.0
"""Failures are forgotten after a time, so what follows from the records is computed anew now and then."""
FULL_SHARE = 0.9
"""Cells in use, of all: from here on a context counts as nearly full."""

_ASKED = (
    (re.compile(r"alloc\w*\b.*\bof size (\d{5,})"), 1),
    (re.compile(r"(?:allocating|allocation of)\s+([\d.]+) MiB"), 1 << 20),
)
"""How the engine's backends name the buffer they could not have, and the unit they name it in."""


class Learning:
    """Owns what was learned of all devices; how far one says anything of another is core's business."""

    def __init__(self, journal: Journal, engine: str) -> None:
        self._journal = journal
        self._engine = engine
        self._lessons = Lessons()
        self._known: dict[tuple[StartModel, str, str, Tier], Learned] = {}
        self._lock = threading.Lock()
        """Loads are weighed in threads while the loop adds what others taught."""
        self._known_at = 0.0

    async def recall(self) -> None:
        """What earlier runs of this engine's build taught."""
        for row in await self._journal.measurements():
            try:
                self._lessons.add(decode(row.value))
            except msgspec.MsgspecError as e:
                _log.warning("a measurement of %s is passed over: %s", row.key, e)

    def lessons(self, held: HeldDevice, place: Place) -> Callable[[StartModel, Tier], Learned]:
        """What a load there is to be charged beside its predicted parts, asked anew for each weighing."""
        first, floors = first_charge(place, str(held.device.kind))

        def learned(start: StartModel, tier: Tier) -> Learned:
            # A search weighs hundreds of loads, so the file is not looked at and no key is spelled out each time.
            asked, now = (start, held.name, held.device.description, tier), time.time()
            with self._lock:
                if now - self._known_at > KNOWN_FOR_S:
                    self._known.clear()
                    self._known_at = now
                known = self._known.get(asked)
                if known is None:
                    key, under = key_of(start, held.name), self._circumstances(held)
                    known = self._lessons.learned(key, under, predicted_by=tier, start=first, floors=floors, now=now)
                    self._known[asked] = known
                return known

        return learned

    # ------------------------------------------------------------ what happens

    def loaded(self, berth: Berth, ready: Ready) -> None:
        """A worker is ready: what it holds now, beside what was predicted and what the engine reported."""
        self._observe(berth, ready, peak_bytes=None)

    def peaked(self, berth: Berth) -> None:
        """Looked at often: a new highest after full use is written down, once per worker unless it grows."""
        life, ready = berth.life, berth.route.replica.ready
        if life is None or ready is None:
            return
        cells = berth.route.cells
        if cells.total_cells - cells.free_cells >= FULL_SHARE * cells.total_cells:
            life.was_full = True
        if life.was_full and not berth.busy and life.peak_bytes >= life.recorded_peak_bytes + PEAK_STEP_BYTES:
            life.recorded_peak_bytes = life.peak_bytes
            self._observe(berth, ready, peak_bytes=life.peak_bytes)

    def lost(self, berth: Berth, death: Death) -> None:
        """A worker died. Where memory that it had leased was not there, the margin of such loads was too small."""
        life = berth.life
        if life is None or death.kind is not FaultKind.ALLOCATION:
            return
        asked = asked_bytes(death.log_tail)
        if asked is None:
            return
        self._add(
            FailedAllocation(
                key=key_of(life.start, berth.held.name),
                under=self._circumstances(berth.held),
                at=time.time(),
                asked_bytes=asked,
                free_bytes=berth.held.device.read().free_bytes,
                margin_bytes=life.demand.margin_bytes or 0,
                fragmentation_bytes=life.demand.fragmentation_bytes or 0,
            )
        )

    # ------------------------------------------------------------ the record

    def _observe(self, berth: Berth, ready: Ready, *, peak_bytes: int | None) -> None:
        life = berth.life
        assert life is not None
        observed = berth.held.private_bytes(ready)
        if observed is None:
            return
        self._add(
            Observation(
                key=key_of(life.start, berth.held.name),
                under=self._circumstances(berth.held),
                at=time.time(),
                predicted=predicted_parts(berth, life),
                reported=reported_parts(berth, ready),
                loaded_bytes=observed if peak_bytes is None else life.loaded_bytes,
                peak_bytes=peak_bytes,
            )
        )
        if peak_bytes is None:
            life.loaded_bytes = observed

    def _add(self, record: Record) -> None:
        with self._lock:
            self._lessons.add(record)
            self._known.clear()
        kept = AddMeasurement(
            key=record.key.text,
            engine=record.under.engine_build,
            driver=record.under.driver,
            at=record.at,
            value=encode(record),
        )
        self._journal.submit(kept).add_done_callback(log_failure(f"what the load of {record.key.model} taught"))

    def _circumstances(self, held: HeldDevice) -> Circumstances:
        return Circumstances(
            engine_kind=f"llama.cpp {held.device.kind}", engine_build=self._engine, driver=held.device.description
        )


def key_of(start: StartModel, device: str) -> Key:
    """A model's file by name, size and time, and everything of a start that costs memory."""
    path = Path(start.path)
    try:
        facts = path.stat()
        model = f"{path.name} {facts.st_size} {facts.st_mtime_ns}"
    except OSError:
        model = path.name
    options = msgspec.structs.replace(same_load(start), path="", libraries="", threads=1)
    return Key(model=model, device=device, options=msgspec.json.encode(options).decode())


def predicted_parts(berth: Berth, life: Life) -> dict[str, int | None]:
    """The demand on its device by part, without pages of the file where those are not observed."""
    parts = dict(life.demand.parts())
    if berth.scales.place is not Place.CARD and parts["weights_bytes"] is not None:
        parts["weights_bytes"] -= life.demand.mapped_bytes
    return parts


def reported_parts(berth: Berth, ready: Ready) -> dict[str, int]:
    """The engine's own buffers on the device, by part."""
    parts = {
        "weights_bytes": ready.model_bytes,
        "kv_bytes": ready.kv_bytes,
        "state_bytes": ready.state_bytes,
        "compute_bytes": ready.compute_bytes,
    }
    if berth.scales.place is not Place.CARD:
        parts["output_bytes"] = ready.output_bytes
        mapped = berth.life is not None and berth.life.start.use_mmap
        parts["weights_bytes"] = (ready.repacked_bytes or 0) if mapped else (ready.model_bytes or 0)
    return {name: value for name, value in parts.items() if value}


def asked_bytes(lines: tuple[str, ...]) -> int | None:
    """The buffer that could not be had, by the engine's last words; None where they do not name one."""
    for line in reversed(lines):
        for pattern, unit in _ASKED:
            if (found := pattern.search(line)) is not None:
                return int(float(found[1]) * unit)
    return None
