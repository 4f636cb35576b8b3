"""Recorded readings through a real ledger: what a device says late, wrongly or not at all never over-commits it.

The truth beside each reading is the kernel's. The recordings are made by `python -m tests.integration.traces.record`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import pynvml
import pytest

from relevo.core.leases.lease import Lease, Shortfall
from relevo.core.leases.ledger import Ledger
from relevo.devices.device import Device
from relevo.devices.events import DeviceEvent
from relevo.devices.nvidia import NvidiaDevice

from .fakes.nvml import FakeNvml
from .fakes.trace_device import Trace, TraceDevice, Truth

MIB = 1 << 20
TRACES = ("lag", "game", "lost", "reset", "stale", "all_free")
HEADROOM = 32 * MIB
LAG_S = 1.5
"""What a neighbour took within this time before a reading it may not show; the headroom is for that."""
STALE_AFTER_S = 5.0
CRUMBS = 16 * MIB
"""A process's own small objects come and go between two looks at it."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The ledger's figures after one reading, beside the truth."""

    at: float
    available_bytes: int | None
    external_bytes: int | None
    returning_bytes: int
    truth: Truth


class Replay:
    """Walks through a trace as the service would: leases before loads, settles what is ready, releases what is gone."""

    def __init__(self, name: str, every: int = 1) -> None:
        self.trace = Trace(name)
        self.now = 0.0
        self.device = TraceDevice("gpu0", self.trace, lambda: self.now)
        self.ledger = Ledger("gpu0", headroom_bytes=HEADROOM, stale_after_s=STALE_AFTER_S)
        self.leases: dict[str, Lease] = {}
        self.refused: list[tuple[float, Shortfall]] = []
        self.moments: list[Moment] = []
        self._every = every
        self._foreign: deque[tuple[float, int]] = deque()
        self._read_at = 0.0

    def run(self) -> list[Moment]:
        assert isinstance(self.device, Device)
        readings = 0
        for line in self.trace.lines:
            self.now = line["at"]
            if "do" in line:
                self._act(line["do"], line["holder"], line)
                continue
            readings += 1
            if readings % self._every == 0:
                reading = self.device.read()
                self._read_at = reading.read_at
                self.ledger.observe(reading)
            self._check()
        return self.moments

    def _act(self, what: str, holder: str, line: dict[str, int]) -> None:
        if what == "load":
            lease = self.ledger.request(holder, line["lease_bytes"], self.now)
            if isinstance(lease, Shortfall):
                self.refused.append((self.now, lease))
            else:
                self.leases[holder] = lease
        elif holder not in self.leases:
            return  # it was refused
        elif what == "ready":
            self.ledger.settle(self.leases[holder], line["observed_bytes"])
        elif what == "unload":
            self.ledger.drain(self.leases[holder])
        else:
            self.ledger.release(self.leases.pop(holder))

    def _check(self) -> None:
        """At every moment: what could be leased now, all leases and the neighbour's use fit on the device together."""
        truth = self.device.truth()
        self._foreign.append((self.now, truth.foreign_bytes))
        while self._foreign[0][0] < self._read_at - LAG_S - 0.25:
            self._foreign.popleft()
        seen_foreign = min(bytes_ for _, bytes_ in self._foreign)
        ledger = self.ledger
        available = ledger.available_bytes if self._grants() else None
        ours = max(ledger.leased_bytes, truth.ours_bytes if self.leases else 0)
        if available:
            taken = available + ours + seen_foreign
            assert taken <= self.trace.total_bytes, f"over-committed by {taken - self.trace.total_bytes} at {self.now}"
        self.moments.append(Moment(self.now, available, ledger.external_bytes, ledger.returning_bytes, truth))

    def _grants(self) -> bool:
        """Whether a lease of nothing would be granted: not with stale or unknown figures."""
        return self.ledger.shortfall("anybody", 0, self.now) is None


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("every", [1, 4])
def test_no_trace_over_commits_the_device(name: str, every: int) -> None:
    """Read four times a second, and once."""
    replay = Replay(name, every)
    moments = replay.run()
    assert len(moments) > 40
    known = [m for m in moments if m.available_bytes]
    assert len(known) >= len(moments) / 5, "a ledger that never grants proves nothing"


def test_a_load_that_is_shown_late_is_not_free_and_an_unload_that_is_shown_late_not_twice() -> None:
    replay = Replay("lag")
    moments = replay.run()
    assert replay.refused == [] and not replay.leases
    # No neighbour came or went, so nothing may be booked as one, however late the readings were.
    assert all((m.external_bytes or 0) <= m.truth.foreign_bytes + CRUMBS for m in moments)
    end = moments[-1]
    assert end.returning_bytes == 0 and end.available_bytes is not None
    assert end.available_bytes >= replay.trace.total_bytes - end.truth.foreign_bytes - HEADROOM - CRUMBS


def test_a_game_counts_at_once_and_its_going_is_believed_slowly() -> None:
    moments = Replay("game").run()
    grew = [m for m in moments if m.truth.foreign_bytes > 350 * MIB]
    for moment in grew[2:]:
        assert moment.external_bytes is not None and moment.external_bytes >= moment.truth.foreign_bytes - CRUMBS
    top = grew[-1].external_bytes
    assert top is not None
    after = [m for m in moments if m.at > grew[-1].at]
    soon = next(m for m in after if m.at >= grew[-1].at + 2.0)
    late = after[-1]
    assert soon.external_bytes is not None and soon.external_bytes > top * 0.8
    assert late.external_bytes is not None and late.external_bytes < top * 0.3
    falling = [m.external_bytes for m in after if m.external_bytes is not None]
    assert all(b <= a + CRUMBS for a, b in itertools.pairwise(falling))


def test_a_lost_device_grants_nothing_until_it_is_read_again() -> None:
    replay = Replay("lost")
    moments = replay.run()
    gone = [m for m in moments if m.available_bytes is None]
    assert 3.0 < gone[-1].at - gone[0].at < 8.0
    after = [m for m in moments if m.at > gone[-1].at]
    assert after[0].available_bytes is not None and after[0].available_bytes > 400 * MIB
    assert replay.refused == [] and list(replay.leases) == ["chat"]


def test_after_a_reset_the_bytes_are_free_again_and_the_worker_fits_again() -> None:
    replay = Replay("reset")
    moments = replay.run()
    assert replay.refused == [] and list(replay.leases) == ["chat"]
    end = moments[-1]
    assert end.available_bytes is not None and end.available_bytes > 500 * MIB


def test_figures_that_stand_still_are_soon_no_figures() -> None:
    """The game that started meanwhile is not in them, so they must not be leased by for ever."""
    moments = Replay("stale").run()
    frozen_at = next(m.at for m in moments if m.truth.foreign_bytes > 350 * MIB) - 2.0
    refusing = [m for m in moments if m.available_bytes is None and m.at > 1.0]
    assert refusing and frozen_at + 4.0 < refusing[0].at < frozen_at + 6.0
    assert moments[-1].available_bytes is not None and moments[-1].external_bytes is not None
    assert moments[-1].external_bytes >= 390 * MIB


def test_a_driver_that_calls_everything_free_does_not_make_the_neighbour_go_away() -> None:
    replay = Replay("all_free")
    moments = replay.run()
    lies = [m for m in moments if m.external_bytes is None and m.available_bytes is not None]
    assert len(lies) > 60  # it says so: the figure is not shown as if it were known
    for moment in lies:
        assert moment.available_bytes is not None
        bound = replay.trace.total_bytes - moment.truth.foreign_bytes - moment.truth.ours_bytes - HEADROOM
        assert moment.available_bytes <= bound + CRUMBS
    assert moments[-1].external_bytes is not None and moments[-1].external_bytes >= 300 * MIB


def test_a_device_that_was_never_read_grants_nothing() -> None:
    ledger = Ledger("gpu0")
    refused = ledger.request("chat", 1, 0.0)
    assert isinstance(refused, Shortfall) and refused.available_bytes is None


class CardReplay:
    """The same for an NVIDIA card: the trace feeds the management library, the reader reads it, the ledger is told."""

    def __init__(self) -> None:
        self.trace = Trace("nvidia")
        self.now = -1.0
        self.nvml = FakeNvml(self.trace.total_bytes, self.trace.total_bytes, 0)
        self.device = NvidiaDevice("gpu0", nvml=self.nvml, clock=lambda: self.now, interval_s=0.002, retry_s=0.002)
        self.ledger = Ledger("gpu0", stale_after_s=STALE_AFTER_S)
        self.events: list[DeviceEvent] = []
        self.lease: Lease | None = None
        self.refused: list[Shortfall] = []
        self.shown: list[tuple[float, int | None, int | None]] = []

    def run(self) -> None:
        self.device.start()
        try:
            for line in self.trace.lines:
                self._step(line)
        finally:
            self.device.stop()

    def _step(self, line: dict[str, Any]) -> None:
        if "do" in line:
            self._act(line)
        elif "xid" in line:
            self.nvml.xid(line["xid"])
            told, deadline = len(self.events), time.monotonic() + 10
            while len(self.events) == told:
                self.events += self.device.events()
                assert time.monotonic() < deadline
                time.sleep(0.001)
        elif "fault" in line:
            self.nvml.fault = getattr(pynvml, line["fault"])
            self._read(line["at"])
        else:
            memory = self.nvml.memory
            memory.total, memory.free, memory.reserved = (
                line[name] * MIB for name in ("total_mib", "free_mib", "reserved_mib")
            )
            self.nvml.processes = [(os.getpid(), line["worker_mib"] * MIB)] if "worker_mib" in line else []
            self._read(line["at"])

    def _act(self, line: dict[str, Any]) -> None:
        if line["do"] == "load":
            lease = self.ledger.request("chat", line["lease_mib"] * MIB, line["at"])
            self.lease = lease if isinstance(lease, Lease) else None
            self.refused += [lease] if isinstance(lease, Shortfall) else []
        elif self.lease is not None and line["do"] == "ready":
            self.ledger.settle(self.lease, line["observed_mib"] * MIB)
        elif self.lease is not None and line["do"] == "unload":
            self.ledger.drain(self.lease)
        elif self.lease is not None:
            self.ledger.release(self.lease)

    def _read(self, at: float) -> None:
        """Let the watching thread see it, then tell the ledger, as the service does."""
        self.now = at
        deadline = time.monotonic() + 10
        while self.device.read().read_at != at:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.ledger.observe(self.device.read())
        self.events += self.device.events()
        self.shown.append((at, self.ledger.available_bytes, self.ledger.external_bytes))


def test_a_card_with_a_game_a_broken_worker_and_a_loss_is_followed_from_the_driver_to_the_ledger() -> None:
    replay = CardReplay()
    replay.run()
    assert replay.refused == []
    figures = {at: (available, external) for at, available, external in replay.shown}
    gib = MIB << 10
    # Before the load is visible its lease counts, and after, it is not counted twice.
    loading = [available for at, (available, _) in figures.items() if 2.5 <= at <= 7.9 and available is not None]
    assert max(loading) - min(loading) < 2 * gib and max(loading) < 16 * gib
    # The desktop and the game are the neighbours'; the worker's death does not change them.
    for at, least, most in ((1.0, 1100, 1200), (11.5, 6200, 6700), (15.05, 6200, 13000), (18.8, 6200, 6800)):
        external = figures[at][1]
        assert external is not None and least * MIB <= external <= most * MIB, at
    assert [e.code for e in replay.events] == ["xid 31", "xid 79", "device_lost"]
    assert [e.kind.fault is not None for e in replay.events] == [False, True, True]
    assert figures[20.5] == (None, None)
    assert isinstance(replay.ledger.request("chat", 1, 20.5), Shortfall)
    assert "card is gone" in (replay.ledger.unknown_reason or "")
