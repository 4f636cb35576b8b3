"""`relevo status`: what the running service knows of itself."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from relevo.cli.output import bytes_text, duration_text, figure, plain, print_json, short, table, time_text
from relevo.cli.place import NO_SERVICE_PLACE, Json, ServicePlace

if TYPE_CHECKING:
    from rich.console import RenderableType

_EVERY_S = 1.0
Watch = Annotated[
    bool, Parameter(name="--watch", negative=(), show_default=False, help="Keep showing it, until interrupted.")
]


def status(*, place: ServicePlace = NO_SERVICE_PLACE, json: Json = False, watch: Watch = False) -> int:
    """Show devices, replicas and lanes of the running service.

    Exits 0 while any route serves, degraded or not, and 1 when none does or nothing runs.
    A figure that is not known says why.
    """
    from relevo.cli.running import running

    with running(place) as service:
        if watch:
            return _watch(service, as_json=json)
        return _show(service, as_json=json)


def _read(service: Any) -> dict[str, Any]:
    """The status object, or one that says `down` and why."""
    from relevo.cli.running import ServiceDown

    try:
        return dict(service.get("/relevo/v1/status"))
    except ServiceDown as error:
        return {
            "state": "down", "reason": error.message, "url": service.url,
            "devices": [], "replicas": [], "lanes": [], "certificate": None,
        }  # fmt: skip


def _show(service: Any, *, as_json: bool) -> int:
    from relevo.cli.output import complain, console

    found = _read(service)
    down = found["state"] == "down" and "url" in found
    if as_json:
        print_json(found)
    elif down:
        complain(found["reason"] + ("" if "starting" in found["reason"] else " Start it with `relevo serve`."))
    else:
        screen = console()
        for part in render_status(found, service.url):
            screen.print(part)
    return 1 if found["state"] == "down" else 0


def _watch(service: Any, *, as_json: bool) -> int:
    import json as json_lines

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from relevo.cli.output import console

    if as_json or not sys.stdout.isatty():
        while True:  # one object a line, for programs that follow
            print(json_lines.dumps(_read(service), ensure_ascii=False), flush=True)
            time.sleep(_EVERY_S)

    def view() -> RenderableType:
        found = _read(service)
        if found["state"] == "down" and "url" in found:
            return Text(found["reason"])
        return Group(*render_status(found, service.url))

    with Live(view(), console=console(), screen=False, auto_refresh=False) as live:
        while True:
            time.sleep(_EVERY_S)
            live.update(view(), refresh=True)


def render_status(found: dict[str, Any], url: str) -> list[RenderableType]:
    """The status object for people."""
    from rich.text import Text

    state = str(found.get("state"))
    colour = {"ok": "green", "degraded": "yellow"}.get(state, "red")
    head = Text.assemble("Relevo ", (state, f"bold {colour}"), f"  {plain(str(found.get('version', '')))}  {url}")
    for reason in found.get("reasons") or []:
        head.append(f"\n{plain(str(reason))}")
    tables = (_devices(found), _leases(found), _replicas(found), _lanes(found))
    parts: list[RenderableType] = [head, *(part for made in tables for part in (Text(), made))]
    parts.append(Text("\n" + certificate_text(found.get("certificate"), found.get("certificate_reason"))))
    return parts


_SIZES = {
    "total": "total_bytes",
    "driver": "driver_reserved_bytes",
    "leased": "leased_bytes",
    "external": "external_bytes",
    "available": "available_bytes",
    "headroom": "headroom_bytes",
}


def _devices(found: dict[str, Any]) -> RenderableType:
    made = table("Devices", "name", "kind", *_SIZES, "pressure", "read", "breaker", numbers=tuple(_SIZES))
    notes: list[str] = []
    for device in found.get("devices") or []:
        name, breaker = plain(str(device.get("name"))), device.get("breaker") or {}
        figures = [figure(device, field) for field in _SIZES.values()]
        made.add_row(
            name,
            kind_text(device),
            *(text.split(":")[0] for text in figures),
            plain(str(device.get("pressure_stage") or "unknown")),
            age_text(device.get("read_at")),
            str(breaker.get("state") or "-"),
        )
        if device.get("description"):
            notes.append(f"{name}: {plain(str(device['description']))}")
        notes += [f"{name}: {size} is {text}" for size, text in zip(_SIZES, figures, strict=True) if ":" in text]
        if device.get("pressure_reason"):
            notes.append(f"{name}: pressure is unknown: {plain(str(device['pressure_reason']))}")
        if breaker.get("state") not in (None, "closed"):
            notes.append(f"{name}: breaker {breaker_text(breaker)}")
    made.caption = "\n".join(notes) or None
    return made


def _leases(found: dict[str, Any]) -> RenderableType:
    """Who holds what of each device, beside what was seen of it."""
    numbers = ("leased", "seen", "highest")
    made = table("Leases", "device", "holder", "state", *numbers, "weighed by", numbers=numbers)
    loads = {replica.get("name"): replica for replica in found.get("replicas") or []}
    notes: list[str] = []
    for device in found.get("devices") or []:
        for lease in device.get("leases") or []:
            replica = loads.get(lease.get("holder")) or {}
            load = replica.get("load") if replica.get("device") == device.get("name") else None
            load = load or {}
            made.add_row(
                plain(str(device.get("name"))),
                plain(str(lease.get("holder"))),
                plain(str(lease.get("state"))),
                bytes_text(lease["bytes"]),
                *(
                    "-" if load.get(field) is None else bytes_text(load[field])
                    for field in ("observed_bytes", "peak_bytes")
                ),
                plain(str(load.get("tier") or "-")),
            )
            notes += [f"{plain(str(lease.get('holder')))}: {plain(change)}" for change in load.get("changes") or []]
    made.caption = "\n".join(notes) or None
    return made


def age_text(at: Any) -> str:
    """How long ago a figure was read."""
    return "never" if not isinstance(at, int | float) else f"{duration_text(max(0.0, time.time() - at))} ago"


def kind_text(device: dict[str, Any]) -> str:
    """What a device is; an emulated one never passes for a real one."""
    kind = plain(str(device.get("kind") or "unknown"))
    return f"{kind}, emulated" if device.get("emulated") and "emulated" not in kind else kind


def breaker_text(breaker: Any) -> str:
    """State, since when and why, and when it is tried again."""
    if not isinstance(breaker, dict):
        return "-"
    text = plain(str(breaker.get("state")))
    if text == "closed":
        return text
    if breaker.get("cause"):
        text += f": {short(breaker['cause'], 200)}"
    if breaker.get("since"):
        text += f" (since {time_text(breaker['since'])})"
    if breaker.get("next_probe_s") is not None:
        text += f", next probe in {duration_text(breaker['next_probe_s'])}"
    return text


def _replicas(found: dict[str, Any]) -> RenderableType:
    made = table("Replicas", "model", "task", "route", "device", "state", "process", "engine", numbers=("process",))
    for replica in found.get("replicas") or []:
        made.add_row(
            *(plain(str(replica.get(field) or "-")) for field in ("model", "task", "route", "device", "state")),
            str(replica.get("pid") or "-"),
            plain(str(replica.get("engine") or "-")),
        )
    return made


_CELLS = ("cells_live", "cells_leased", "cells_set_aside", "cells_total")


def _lanes(found: dict[str, Any]) -> RenderableType:
    counts = ("queued", "running", "limit", "parked")
    cells = "cells live / leased / set aside / all"
    made = table("Lanes", "name", *counts, "oldest waits", cells, numbers=counts)
    notes: list[str] = []
    for lane in found.get("lanes") or []:
        age_ms = lane.get("oldest_age_ms")
        made.add_row(
            plain(str(lane.get("name"))),
            *(str(lane.get(field, "unknown")) for field in counts),
            duration_text(age_ms / 1000) if isinstance(age_ms, int | float) and lane.get("queued") else "-",
            " / ".join(str(lane.get(field, "unknown")) for field in _CELLS) if "cells_total" in lane else "unknown",
        )
        if lane.get("parked_reason"):
            notes.append(f"{plain(str(lane.get('name')))}: parked: {plain(str(lane['parked_reason']))}")
    made.caption = "\n".join(notes) or None
    return made


def certificate_text(certificate: Any, reason: Any = None) -> str:
    """What a drill has proved here, if anything."""
    if not isinstance(certificate, dict) or not certificate.get("verdict"):
        return f"Certificate: none. {plain(str(reason))}" if reason else "Certificate: none."
    expires = certificate.get("expires")
    return f"Certificate: {plain(str(certificate['verdict']))}" + (f", until {time_text(expires)}." if expires else ".")
