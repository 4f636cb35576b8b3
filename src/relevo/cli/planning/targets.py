"""Where a model could go: the devices of the running service, those of this machine, or one that isn't here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relevo.core.errors import ConfigError
from relevo.core.leases.ledger import Ledger
from relevo.core.leases.reading import Reading
from relevo.core.loads.wish import DeviceView, Holder
from relevo.core.units import size_text

if TYPE_CHECKING:
    from relevo.cli.place import ServicePlace
    from relevo.config import Config, DeviceConfig
    from relevo.service.paths import Paths

HOST = "host"
KINDS = ("nvidia", "amd", "vulkan", "emulated", "cpu")
"""What `--device` takes besides the name of a described device."""
_CARDS = {"nvidia": "CUDA0", "amd": "ROCm0", "vulkan": "Vulkan0"}
"""The engine's name of the first device of a kind."""
_CHARGED_AS = {"cuda": "nvidia", "rocm": "amd", "metal": "vulkan"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device, and what is free of it."""

    name: str
    kind: str
    """nvidia, amd, vulkan, emulated or host: what decides how its memory is counted."""
    engine_device: str
    """The engine's name for it."""
    total_bytes: int | None = None
    available_bytes: int | None = None
    """What a lease could take now, headroom already taken off."""
    headroom_bytes: int | None = None
    reason: str | None = None
    """Why what is available is not known."""
    description: str = ""
    """The card and its driver, in the service's words: of another nothing that was learned counts."""
    device_kind: str = ""
    """As the service calls the kind; `kind` is what it is charged as."""
    source: str = ""
    """Where the figures come from, for people."""
    here: bool = True
    """Whether it is a device of this machine; else the figures are what was asked about."""
    holders: tuple[Holder, ...] = ()
    largest_block_bytes: int | None = None
    pressure: str = "calm"
    """As the service judges it: calm, tight, critical or unknown."""

    @property
    def emulated(self) -> bool:
        """Whether it is a stand-in."""
        return self.kind == "emulated"

    @property
    def is_host(self) -> bool:
        """Whether it is the machine's own memory."""
        return self.kind == HOST

    def view(self) -> DeviceView:
        """As the ladder reads it."""
        return DeviceView(
            name=self.name,
            available_bytes=self.available_bytes,
            reason=self.reason,
            total_bytes=self.total_bytes,
            holders=self.holders,
            largest_block_bytes=self.largest_block_bytes,
            pressure=self.pressure,
        )


def imagined(kind: str, total_bytes: int | None) -> Target:
    """A device that isn't here, of which all but the headroom is free."""
    told = None if total_bytes is None else Reading(total_bytes, total_bytes, read_at=0.0)
    reason = "--device-memory 8GiB plans for one of 8 GiB."
    name = f"a device of kind {kind}" if total_bytes is None else f"a device of {size_text(total_bytes)}"
    return _read(
        name, kind, _CARDS.get(kind, "cpu"), told, reason=reason, source="not here: as given, all free", here=False
    )


def targets_now(config: Config, place: ServicePlace) -> list[Target]:
    """The host and every device, by the running service where one runs, else read now. Never raises for a device."""
    found = _of_service(place)
    known = {target.name for target in found}
    found += [
        _described(name, device, config, place.paths())
        for name, device in described_devices(config)
        if name not in known
    ]
    if HOST not in known:
        found.insert(0, _host(config))
    return found


def described_devices(config: Config) -> list[tuple[str, DeviceConfig]]:
    """The devices of the configuration; without any, a graphics card where there is one."""
    if config.devices:
        return sorted(config.devices.items())
    from relevo.config import DeviceConfig
    from relevo.setup.machine import look_at_machine

    machine = look_at_machine()
    return [("gpu0", DeviceConfig(kind="auto"))] if machine.cards or machine.nvidia_driver is not None else []


def choose_target(targets: list[Target], wanted: str | None, preferred: str | None, memory_bytes: int | None) -> Target:
    """The device to plan for. `wanted`: --device, a name or a kind; `preferred`: the model's own.

    Raises ConfigError for one that is neither.
    """
    devices = {target.name: target for target in targets if not target.is_host}
    if wanted in ("cpu", HOST):
        return next(target for target in targets if target.is_host)
    if wanted is not None and wanted not in devices and wanted not in KINDS:
        known = ", ".join((*devices, *KINDS))
        raise ConfigError(f"--device {wanted} is neither a device here nor a kind of one (possible: {known}).")
    chosen = devices.get(wanted or "") or devices.get(preferred or "")
    if wanted in KINDS:
        chosen = next((target for target in devices.values() if target.kind == wanted), None)
    elif chosen is None:
        chosen = next(iter(devices.values()), None)
    kind = wanted if wanted in KINDS else chosen.kind if chosen is not None else "nvidia"
    if memory_bytes is not None or chosen is None:
        return imagined(str(kind), memory_bytes)
    return chosen


def _read(name: str, kind: str, engine_device: str, reading: Reading | None, **more: Any) -> Target:
    """A target by the ledger's own arithmetic, so that a plan and the service agree."""
    declared, headroom = more.pop("declared_bytes", None), more.pop("headroom_bytes", None)
    ledger = Ledger(name, declared_bytes=declared, headroom_bytes=headroom)
    if reading is not None:
        ledger.observe(reading)
    known = ledger.available_bytes is not None
    return Target(
        name=name,
        kind=kind,
        engine_device=engine_device,
        total_bytes=ledger.total_bytes,
        available_bytes=ledger.available_bytes,
        headroom_bytes=ledger.headroom_bytes,
        reason=None if known else more.pop("reason", None) or ledger.unknown_reason,
        source=more.pop("source", f"{name}: read now"),
        here=more.pop("here", True),
        description=more.pop("description", ""),
        device_kind=more.pop("device_kind", kind),
    )


# ------------------------------------------------------------------ the service's


def _of_service(place: ServicePlace) -> list[Target]:
    """Its devices; none where none runs."""
    import os

    from relevo.cli.running import URL_VARIABLE, ServiceDown, running

    named = place.url or os.environ.get(URL_VARIABLE)
    if not named and not place.paths().state.is_dir():
        return []
    from relevo.journal.folder import read_holder

    if not named and read_holder(place.paths().state) is None:
        return []
    try:
        with running(place) as service:
            found = service.get("/relevo/v1/status")
    except ServiceDown:
        if named:
            raise
        return []
    return [_of_status(device) for device in found.get("devices") or []]


def _of_status(device: dict[str, Any]) -> Target:
    kind = str(device.get("kind"))
    kind = _CHARGED_AS.get(kind, kind)
    leases = device.get("leases") or []
    return Target(
        name=str(device.get("name")),
        kind=kind,
        engine_device=_CARDS.get(kind, "cpu"),
        total_bytes=device.get("total_bytes"),
        available_bytes=device.get("available_bytes"),
        headroom_bytes=device.get("headroom_bytes"),
        reason=device.get("reason") if device.get("available_bytes") is None else None,
        description=str(device.get("description") or ""),
        device_kind=str(device.get("kind")),
        source="the running service's figures",
        largest_block_bytes=device.get("largest_block_bytes"),
        pressure=str(device.get("pressure_stage") or "calm"),
        holders=tuple(Holder(holder=str(held.get("holder")), bytes_=int(held.get("bytes") or 0)) for held in leases),
    )


# ---------------------------------------------------------------- read here and now


def _host(config: Config) -> Target:
    from relevo.devices.host import HostDevice, floor_bytes

    device = HostDevice()
    reading = device.read()
    floor = floor_bytes(reading.total_bytes, config.host.floor_bytes)  # as the service keeps it free
    limits = {"declared_bytes": config.host.budget_bytes, "headroom_bytes": floor}
    return _read(HOST, HOST, "cpu", reading, description=device.description, **limits)


def _described(name: str, described: DeviceConfig, config: Config, paths: Paths) -> Target:
    if described.kind == "emulated":
        from relevo.devices.soft import SoftDevice

        total = described.total_bytes or 0
        reading = Reading(total, total, read_at=0.0)
        limits = {"declared_bytes": total, "headroom_bytes": described.headroom_bytes}
        return _read(name, "emulated", "cpu", reading, description=SoftDevice(name, total).description, **limits)
    return _card(name, described, config, paths)


def _card(name: str, described: DeviceConfig, config: Config, paths: Paths) -> Target:
    """Ask the engine and the driver; what cannot be read says why."""
    from relevo.core.errors import RelevoError

    kind: str = "nvidia" if described.kind == "auto" else described.kind
    limits = {"declared_bytes": described.total_bytes, "headroom_bytes": described.headroom_bytes}
    try:
        from relevo.devices.ggml import inspect
        from relevo.service.house import open_device
        from relevo.setup.libraries import find

        libraries = find(config.engine.libraries)
        device = open_device(name, described, inspect(libraries), libraries, paths)
        try:
            kind = _CHARGED_AS.get(str(device.kind), str(device.kind))
            told = {"description": device.description, "device_kind": str(device.kind)}
            return _read(name, kind, device.engine_device, device.read(), **told, **limits)
        finally:
            device.stop()
    except RelevoError as error:
        return _read(name, kind, _CARDS.get(kind, "cpu"), None, reason=error.message, **limits)
