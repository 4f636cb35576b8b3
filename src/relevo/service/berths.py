"""What the fleet holds: devices with their ledgers and breakers, and a berth for every route's worker. Records only."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from relevo.core.breaker import Breaker
from relevo.core.described import Described
from relevo.core.errors import OurBug
from relevo.core.events import Ready, StartModel
from relevo.core.leases.lease import Lease, LeaseState
from relevo.core.leases.ledger import Ledger
from relevo.core.loads.ladder import LoadVerdict
from relevo.core.loads.wish import CPU_ROUTES
from relevo.core.memory.demand import Demand
from relevo.devices.device import Device
from relevo.devices.host import HostDevice
from relevo.devices.soft import SoftDevice
from relevo.models.header_cache import FileIdentity
from relevo.processes import memory
from relevo.processes.identity import Identity
from relevo.service.routes import Route, ServedModel
from relevo.service.scales import Scales

MIB = 1 << 20
LARGE_BYTES, LARGE_HOST_BYTES = 16 * MIB, 64 * MIB
"""Changes of free memory for which the ladder is asked at once; free RAM is never still."""
SMALL_CHANGES_S = 5.0
"""For smaller ones it is asked so often."""
REFRESHED_S = 60.0
"""A refusal is never older than this, whatever its figures."""


@dataclass(slots=True)
class HeldDevice:
    """A device with its ledger and breaker; the fleet owns both."""

    name: str
    device: Device
    ledger: Ledger
    breaker: Breaker
    yield_s: float = 10.0
    """How long running work may go on when the memory must be given up."""
    calm_since: float | None = None
    """Monotonic; None while a foreign process presses it."""

    @property
    def emulated(self) -> bool:
        """Whether it only plays an accelerator."""
        return self.device.emulated

    def occupy(self, identity: Identity) -> None:
        """A worker's process exists. An emulated device keeps its memory limit from here on."""
        if isinstance(self.device, SoftDevice):
            self.device.register(identity.pid, identity.start_time)

    def vacate(self, pid: int) -> None:
        """A worker's process is gone."""
        if isinstance(self.device, SoftDevice):
            self.device.forget(pid)

    def observed_bytes(self, ready: Ready) -> int | None:
        """What a worker holds here: told by the kernel where it can, else the sum of the engine's own buffer lines."""
        if isinstance(self.device, SoftDevice):
            return memory.data_bytes(ready.pid)
        if isinstance(self.device, HostDevice):
            return memory.anonymous_bytes(ready.pid)  # pages of a file count as available: they can be read again
        told = self.device.held_by(ready.pid)
        if told is not None:
            return told
        parts = (ready.model_bytes, ready.kv_bytes, ready.compute_bytes)
        return None if None in parts else sum(p or 0 for p in (*parts, ready.state_bytes))

    def private_bytes(self, ready: Ready) -> int | None:
        """The same without pages of the file; None where nobody tells what a single worker holds.

        Which pages of a mapped file are in RAM says nothing about the next load. The rest is counted when reserved: a
        compute buffer is not resident before it was used once.
        """
        if isinstance(self.device, SoftDevice | HostDevice):
            return memory.data_bytes(ready.pid)
        return self.device.held_by(ready.pid)


class Posture(Described):
    """Whether a route's worker is meant to run."""

    WANTED = "wanted", "It is meant to run."
    DORMANT = "dormant", "It is not needed: the whole model is on the device."
    RESTING = "resting", "It was proved and rests; its memory is leased, and it is loaded again when work comes."
    EVICTED = "evicted", "It gave its memory to another model, and is loaded again when it is asked for or has room."
    LEAVING = "leaving", "It ends its work and gives its memory to a program that is not ours."


@dataclass(slots=True)
class Life:
    """What is held for one incarnation of a worker."""

    incarnation: int
    verdict: LoadVerdict
    leases: list[tuple[HeldDevice, Lease]]
    identity: Identity | None = None
    started: float = field(default_factory=time.monotonic)
    peak_bytes: int = 0
    """The most it was seen to hold on its device."""
    recorded_peak_bytes: int = 0
    """Of that, what was learned from already."""
    loaded_bytes: int | None = None
    """What it held right after the load."""
    was_full: bool = False
    """Whether its cells were nearly all in use once: only then its peak is the peak."""

    @property
    def start(self) -> StartModel:
        """How its worker was started."""
        return self.verdict.start

    @property
    def demand(self) -> Demand:
        """What was predicted for its device."""
        return self.verdict.device_demand

    def lease_on(self, held: HeldDevice) -> Lease | None:
        """Its lease there, while it holds one."""
        return next((lease for at, lease in self.leases if at is held and lease.state is not LeaseState.RELEASED), None)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a verdict depended on when the ladder said no; while that stays the same it need not be asked again."""

    figures: Figures
    reason: str
    at: float
    """Monotonic."""

    def stands(self, figures: Figures, now: float) -> bool:
        """Whether it would say the same. Small changes, which are always there, are looked at now and then only."""
        changed = self.figures.change_to(figures)
        return changed is not Change.LARGE and now - self.at < (SMALL_CHANGES_S if changed else REFRESHED_S)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a verdict depends on."""

    states: object
    device: tuple[int | None, ...]
    """Bytes: available, the largest block, and what each holder has."""
    host_bytes: int | None
    """Available."""

    def change_to(self, other: Figures) -> Change | None:
        """How far these differ from later ones; None: nothing that matters."""
        if self.states != other.states or len(self.device) != len(other.device):
            return Change.LARGE
        pairs = [*zip(self.device, other.device, strict=True)]
        if any((a is None) != (b is None) for a, b in [*pairs, (self.host_bytes, other.host_bytes)]):
            return Change.LARGE
        device = max((abs((a or 0) - (b or 0)) for a, b in pairs), default=0)
        host = abs((self.host_bytes or 0) - (other.host_bytes or 0))
        if device >= LARGE_BYTES or host >= LARGE_HOST_BYTES:
            return Change.LARGE
        return Change.SMALL if device >= MIB else None


class Change(Described):
    """How far a device's figures moved."""

    SMALL = "small", "Somebody's window was moved: looked at now and then."
    LARGE = "large", "It may be enough for another verdict: looked at at once."


@dataclass(slots=True)
class Berth:
    """A route's place in the fleet."""

    route: Route
    model: ServedModel
    held: HeldDevice
    host: HeldDevice
    start: StartModel
    """As configured; the ladder may reduce it."""
    scales: Scales
    file: FileIdentity | None = None
    """The model's file as it was when its header was read; None: not looked at."""
    first: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its first start succeeded or failed: those that start after it may go."""
    posture: Posture = Posture.WANTED
    waits_for: Berth | None = None
    twin: Berth | None = None
    """Its model's CPU route; None for that route itself."""
    whole: Berth | None = None
    """Of a hybrid route: the route that puts the whole model on the device."""
    has_part: bool = False
    """Whether such a hybrid route stands by for this one."""
    life: Life | None = None
    verdict: LoadVerdict | None = None
    """The ladder's last word on it."""
    refusal: Refusal | None = None
    """The ladder's last no."""
    said: str | None = None
    """What was last logged of why it does not start, without its figures."""
    room_until: float | None = None
    """Until then what comes free on its device is for this route: somebody was ended for it. Monotonic."""
    kept: list[tuple[HeldDevice, Lease]] = field(default_factory=list)
    """Leases of a resting worker."""
    known_answer: list[int] | None = None
    """To the fixed probe, of the present worker."""
    probing: bool = False
    last_used: float = field(default_factory=time.monotonic)
    wanted_at: float | None = None
    """When a request last had to go elsewhere because this route was not loaded."""
    leaves_by: float | None = None
    load_s: float | None = None
    proved: bool = False
    """Whether a real inference ran on it since the service started."""

    @property
    def used_at(self) -> float:
        """When it last had work, or began to serve. Monotonic."""
        return max(self.last_used, self.route.used_at)

    def __repr__(self) -> str:
        return f"<Berth {self.route.replica.name} on {self.held.name}: {self.posture}>"

    def planned(self) -> StartModel:
        """How the incarnation that starts now is to load. Raises OurBug where none was granted."""
        if self.life is None:
            raise OurBug(f"{self!r} has no lease, so it cannot be started.")
        return self.life.start

    def file_trouble(self) -> str | None:
        """Why its model's file must not be loaded, as a sentence: all its routes have to compute with the same one."""
        if self.file is None:
            return None
        path = Path(self.file.path)
        try:
            found = FileIdentity.of(path, path)
        except OSError as e:
            return f"The file of {self.model.name} cannot be read: {path}: {e.strerror}."
        if found == self.file:
            return None
        return f"{path} is not the file it was when Relevo started. Put that one back, or restart Relevo to serve this."

    def weigh(self, start: StartModel) -> tuple[Demand, Demand]:
        """What a load of this model takes; one for its CPU route is weighed as that route's."""
        on_twin = self.twin is not None and start.route in CPU_ROUTES
        return (self.twin.scales if on_twin and self.twin is not None else self.scales).weigh(start)

    def is_part(self, start: StartModel) -> bool:
        """Whether a start leaves a part of the model in RAM that its route could have on the device."""
        if self.held.emulated:
            return start.use_mmap
        layers = self.scales.shape.layer_count + 1
        return start.gpu_layers < layers or start.host_expert_layers > 0

    def observed_on(self, held: HeldDevice, ready: Ready) -> int | None:
        """What its worker holds of its device, or of RAM beside it; None where nobody tells.

        On an emulated device all private memory is the device's, and pages of the file count as available.
        """
        if held is self.held:
            return held.observed_bytes(ready)
        return 0 if self.held.emulated else held.observed_bytes(ready)

    @property
    def start_bytes(self) -> int | None:
        """What it takes of its device as configured; None: not known."""
        return self.scales.weigh(self.start)[0].total_bytes

    @property
    def leased_bytes(self) -> int:
        """What it holds on its device."""
        lease = self.life.lease_on(self.held) if self.life is not None else None
        return sum(kept.counted_bytes for _, kept in self.kept) if lease is None else lease.counted_bytes

    @property
    def loading(self) -> bool:
        """Whether a worker of it holds a lease and is not ready yet."""
        return self.life is not None and self.route.replica.ready is None

    @property
    def busy(self) -> bool:
        """Whether work runs or waits there."""
        return bool(self.route.running) or self.route.lane.queued > 0

    @property
    def rests(self) -> bool:
        """Whether it is loaded as soon as work comes: nothing keeps it from waking."""
        return self.posture is Posture.RESTING and self.route.waiting_reason is None

    @property
    def shown(self) -> bool:
        """Whether people should see it: a hybrid route only where it is, or was last, needed."""
        return self.posture is not Posture.DORMANT
