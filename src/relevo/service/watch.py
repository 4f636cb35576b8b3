"""Reads the devices at the right moments and acts on what they say: a neighbour grows, a machine woke, room is back.

Readings go to the ledgers; who has to give way is the ladder's rule. A worker that must leave gets no new work at
once, may end what it runs within its device's `yield_s`, and is then ended: its work goes on by the handover table.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from relevo.core.described import named
from relevo.core.leases.lease import LeaseState
from relevo.core.leases.pressure import PressureStage
from relevo.core.leases.reading import Reading
from relevo.core.loads.eviction import Way, who_yields
from relevo.core.loads.standby import Readiness, choose_standby
from relevo.devices.cadence import Cadence, Change
from relevo.devices.events import DeviceEventKind
from relevo.devices.suspend import SleepDetector, read_clocks
from relevo.service.berths import Berth, HeldDevice, Posture
from relevo.service.dispatcher import Dispatcher
from relevo.service.fleet import Fleet
from relevo.service.learning import Learning

_log = logging.getLogger("relevo.watch")

TICK_S = 0.25
READ_TIMEOUT_S = 5.0
RESTORE_EVERY_S = 2.0
MOVING = frozenset({LeaseState.GRANTED, LeaseState.DRAINING, LeaseState.ORPHAN, LeaseState.UNVERIFIED})
"""While a lease is in one of these its device is read often."""


class Watch:
    """One task: read, then act. It decides nothing that a rule in core could."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher, learning: Learning, changed: Callable[[], None]) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._learning = learning
        self._changed = changed
        self._cadences: defaultdict[str, Cadence] = defaultdict(Cadence)
        self._read_at: dict[str, float] = {}
        self._sleep = SleepDetector(read_clocks())
        self._restored_at = 0.0
        self._kept_warm: dict[str, tuple[tuple[int, int], mmap.mmap]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            now = time.monotonic()
            self._notice_sleep(now)
            for held in self._fleet.devices.values():
                if self._is_due(held, now):
                    await self._read(held)
                    self._hear(held)
                    self._relieve(held)
            for berth in self._fleet.berths.values():
                self._note(berth)
                self._lead_on(berth)
            if now - self._restored_at >= RESTORE_EVERY_S:
                self._restored_at = now
                self._restore()
                await self._rest()
            self._changed()
            await asyncio.sleep(TICK_S)

    # ------------------------------------------------------------ reading

    async def _read(self, held: HeldDevice) -> None:
        """A reading, off the loop, with a bound on how long a driver may take."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                reading = await asyncio.to_thread(held.device.read)
        except TimeoutError:
            silent = f"{held.name} did not answer within {READ_TIMEOUT_S:g} s."
            reading = Reading(None, None, read_at=time.monotonic(), reason=silent)
        except OSError as e:
            reading = Reading(None, None, read_at=time.monotonic(), reason=f"{held.name} could not be read: {e}.")
        held.ledger.observe(reading)
        now = self._read_at[held.name] = time.monotonic()
        stage = held.ledger.assess(now).stage
        untold = stage is PressureStage.UNKNOWN and held.ledger.available_bytes is not None  # by declaration only
        if stage is not PressureStage.CALM and not untold:
            held.calm_since = None
        elif held.calm_since is None:
            held.calm_since = now

    def _is_due(self, held: HeldDevice, now: float) -> bool:
        under_way = any(lease.state in MOVING for lease in held.ledger.leases) or held.ledger.returning_bytes > 0
        calm = held.calm_since is not None
        return self._cadences[held.name].wait_s(self._read_at.get(held.name), now, under_way=under_way, calm=calm) <= 0

    def _hear(self, held: HeldDevice) -> None:
        """What the driver or the kernel told of the device: logged, and passed to its breaker where it is a fault."""
        for event in held.device.events():
            if event.kind is not DeviceEventKind.INFORMATION:
                _log.warning("%s: %s (%s)", held.name, event.sentence, event.code)
            self._cadences[held.name].changed(Change.EVENT, time.monotonic())
            if event.kind.fault is not None:
                held.ledger.doubt(event.sentence, time.monotonic())
                self._fleet.device_fault(held, event.kind.fault, event.sentence)

    def _note(self, berth: Berth) -> None:
        """What a worker holds now, its highest so far, and when it was last used."""
        life, ready = berth.life, berth.route.replica.ready
        if life is None or ready is None:
            return
        if berth.busy:
            berth.last_used = time.monotonic()
        for held, lease in life.leases:
            if lease.state not in (LeaseState.SETTLED, LeaseState.UNVERIFIED):
                continue
            observed = berth.observed_on(held, ready)
            if observed is None:
                continue
            if lease.state is LeaseState.UNVERIFIED:
                held.ledger.settle(lease, observed)
            else:
                held.ledger.recount(lease, observed)
            if held is berth.held and observed > life.peak_bytes:
                life.peak_bytes = observed
        self._learning.peaked(berth)

    def _lead_on(self, berth: Berth) -> None:
        """What waits for a route that does not serve, and may not soon, goes where its model is served meanwhile."""
        route = berth.route
        if route.serving or not route.lane.queued:
            return
        if any(other.serving for other in berth.model.routes.values() if other is not route):
            self._dispatcher.reconsider_waiting(route)

    def _notice_sleep(self, now: float) -> None:
        """After a suspend no figure is believed until it was read again, and each worker has to answer a probe."""
        sleep = self._sleep.look(read_clocks())
        if sleep is None:
            return
        _log.warning("%s", sleep.sentence)
        for held in self._fleet.devices.values():
            held.ledger.doubt(sleep.sentence, now)
            self._cadences[held.name].changed(Change.WAKE, now)
        self._fleet.probe_all()

    # ------------------------------------------------------------ a neighbour wants memory

    def _relieve(self, held: HeldDevice) -> None:
        """Under critical pressure memory is given back: the idle go at once, the running get `yield_s` to end."""
        pressure = held.ledger.assess(time.monotonic())
        here = [berth for berth in self._fleet.berths.values() if berth.held is held and berth.twin is not None]
        self._send_away(here)
        if pressure.stage is not PressureStage.CRITICAL or pressure.slack_bytes is None or not here:
            return
        need_bytes = (pressure.headroom_bytes or 0) - pressure.slack_bytes
        for each in who_yields(self._fleet.loads.view_for_relief(held), need_bytes):
            berth = self._fleet.berths[each.holder.holder]
            if each.way is Way.EVICT:
                why = "It was still being loaded." if berth.loading else each.sentence
                self._fleet.loads.evict(berth, f"Another program took the memory of {held.name}. {why}")
            else:
                self._leave(berth, held)

    def _leave(self, berth: Berth, held: HeldDevice) -> None:
        berth.posture = Posture.LEAVING
        berth.leaves_by = time.monotonic() + held.yield_s
        berth.route.closed_reason = (
            f"Another program took the memory of {held.name}; {berth.route.replica.name} ends its work within "
            f"{held.yield_s:g} s and gives its memory back."
        )
        _log.warning("%s", berth.route.closed_reason)
        self._dispatcher.reconsider_waiting(berth.route)

    def _send_away(self, berths: list[Berth]) -> None:
        for berth in berths:
            if berth.posture is not Posture.LEAVING or berth.route.replica.ready is None:
                continue
            if berth.held.ledger.stage is PressureStage.CALM:
                self._stay(berth)
                continue
            done = not berth.route.running
            if done or (berth.leaves_by is not None and time.monotonic() >= berth.leaves_by):
                reason = berth.route.closed_reason or Posture.LEAVING.sentence
                berth.posture = Posture.EVICTED
                berth.route.replica.kill(reason, None)

    def _stay(self, berth: Berth) -> None:
        """The other program gave the memory back before this one had left."""
        _log.info("%s stays: %s is calm again.", berth.route.replica.name, berth.held.name)
        berth.posture = Posture.WANTED
        berth.leaves_by = berth.route.closed_reason = None
        self._dispatcher.pump(berth.route)

    # ------------------------------------------------------------ room is back

    def _restore(self) -> None:
        """Loads that were reduced, or put in parts, are loaded again in full when they are idle and it fits."""
        loads = self._fleet.loads
        for berth in self._fleet.berths.values():
            if berth.life is None or not berth.route.serving:
                continue
            if loads.superfluous(berth):
                berth.route.replica.kill("The whole model is on the device, so this part of it is not needed.", None)
            elif loads.restorable(berth):
                berth.route.replica.kill("There is room for all of it again, so it is loaded anew.", None)

    # ------------------------------------------------------------ rest of CPU routes

    async def _rest(self) -> None:
        for berth in self._fleet.berths.values():
            if berth.twin is None and self._may_rest(berth):
                await self._put_to_rest(berth)

    def _may_rest(self, berth: Berth) -> bool:
        model = berth.model
        idle_s = time.monotonic() - berth.used_at
        serving = berth.route.serving and not berth.busy and berth.posture is Posture.WANTED and berth.proved
        others = any(route.serving for route in model.routes.values() if route is not berth.route)
        return (
            serving and others and idle_s >= model.config.rest_after_s and self.readiness(berth) is not Readiness.WARM
        )

    def readiness(self, berth: Berth) -> Readiness:
        """How ready this CPU route is kept: as configured, else by its recovery budget and measured load."""
        wished = berth.model.config.standby
        if wished != "auto":
            return named(Readiness, wished)
        view = self._fleet.loads.view_of(berth.held, berth)
        if view.available_bytes is not None:  # what it holds already need not be there once more
            view = msgspec.structs.replace(view, available_bytes=view.available_bytes + berth.leased_bytes)
        plan = choose_standby(berth.model.config.recovery_budget_s, None, berth.load_s, berth.start_bytes, view)
        return plan.readiness

    async def _put_to_rest(self, berth: Berth) -> None:
        if self.readiness(berth) is Readiness.MAPPED:
            await asyncio.to_thread(self._keep_pages, berth)
        if berth.busy or not berth.route.serving:
            return
        berth.posture = Posture.RESTING
        berth.route.replica.kill(f"It rests ({berth.model.config.standby}): {Posture.RESTING.sentence}", None)

    def _keep_pages(self, berth: Berth) -> None:
        """Map the model's file and ask the kernel to keep its pages near."""
        name = berth.model.name
        try:
            with Path(berth.start.path).open("rb") as file:
                status = os.fstat(file.fileno())
                if name in self._kept_warm and self._kept_warm[name][0] == (status.st_dev, status.st_ino):
                    return
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as e:  # gone, or empty: the next load will say what is wrong with it
            _log.warning("The pages of %s cannot be kept near: %s", berth.start.path, e)
            return
        mapped.madvise(mmap.MADV_WILLNEED)
        self._kept_warm[name] = ((status.st_dev, status.st_ino), mapped)
