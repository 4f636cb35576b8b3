"""`relevo plan --check`: the load itself beside what was predicted of it.

Three witnesses: the prediction, the engine's own buffer lines, and the driver or the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from relevo.core.errors import RelevoError
from relevo.core.memory.demand import Demand
from relevo.service.plans import RESERVED_BYTES

if TYPE_CHECKING:
    from relevo.cli.planning.full_load import FullLoad
    from relevo.cli.planning.planner import Plan, Planner
    from relevo.core.events import StartModel
    from relevo.devices.device import Device


@dataclass(frozen=True, slots=True)
class Row:
    """One figure by up to three witnesses. None: this witness does not tell it."""

    name: str
    predicted_bytes: int | None
    engine_bytes: int | None = None
    observed_bytes: int | None = None
    observed_by: str | None = None

    @property
    def difference_bytes(self) -> int | None:
        """What the surest witness says beyond the prediction."""
        told = self.observed_bytes if self.observed_bytes is not None else self.engine_bytes
        return None if told is None or self.predicted_bytes is None else told - self.predicted_bytes

    @property
    def difference_percent(self) -> float | None:
        """The same in percent of the prediction."""
        difference = self.difference_bytes
        return None if difference is None or not self.predicted_bytes else 100 * difference / self.predicted_bytes

    def view(self) -> dict[str, Any]:
        """For programs."""
        percent = self.difference_percent
        return {
            "name": self.name,
            "predicted_bytes": self.predicted_bytes,
            "engine_bytes": self.engine_bytes,
            "observed_bytes": self.observed_bytes,
            "observed_by": self.observed_by,
            "difference_bytes": self.difference_bytes,
            "difference_percent": None if percent is None else round(percent, 3),
        }


@dataclass(slots=True)
class Checked:
    """One load that was checked, or why it was not."""

    route: str
    device: str
    options: dict[str, Any] = field(default_factory=dict)
    skipped: str | None = None
    """Why there was nothing to check."""
    failed: str | None = None
    """Why the check could not be done, or what went wrong."""
    load: FullLoad | None = None
    rows: list[Row] = field(default_factory=list)

    def headline(self) -> str:
        """What was done, in a line."""
        where = f"{self.device}, {self.route} route"
        if self.load is None:
            return f"Not checked ({where}): {self.failed or self.skipped}"
        load = self.load
        context = f"{self.options.get('context_tokens')} tokens of context"
        how = f"to the end of its {context}" if load.near_full else f"as far into its {context} as a minute allows"
        return (
            f"Checked ({where}): loaded in {load.load_s:.1f} s by {load.ready.engine}, then a prompt of "
            f"{load.prompt_tokens} tokens in {load.prompt_s:.1f} s, {how}"
        )

    def view(self) -> dict[str, Any]:
        """For programs."""
        load = self.load
        told: dict[str, Any] = {}
        if load is not None:
            told = {
                "engine": load.ready.engine,
                "library": load.ready.library,
                "load_s": round(load.load_s, 3),
                "prompt_tokens": load.prompt_tokens,
                "prompt_s": round(load.prompt_s, 3),
                "near_full_context": load.near_full,
            }
        return {
            "route": self.route,
            "device": self.device,
            "options": self.options,
            "skipped": self.skipped,
            "failed": self.failed,
            **told,
            "rows": [row.view() for row in self.rows],
        }


def check_plan(planner: Planner, plan: Plan) -> list[Checked]:
    """Load it as the ladder would: on its device where that is here, and as its CPU twin. One after the other.

    What does not fit now is not loaded: it would push others out.
    """
    done: list[Checked] = []
    verdict, target = plan.asked.verdict, plan.sizing.target
    if plan.sizing.gpu is not None:
        if not target.here:
            done.append(Checked("gpu", target.name, skipped="It isn't here."))
        elif not verdict.starts_now:
            done.append(Checked("gpu", target.name, failed=verdict.reason))
        else:
            done.append(_checked(planner, plan, verdict.start, verdict.device_demand, verdict.host_demand))
    host = next(row for row in plan.fits if row.target.is_host).verdict
    if host.loads_on_device:
        done.append(_checked(planner, plan, host.start, host.device_demand, Demand()))
    else:
        done.append(Checked("cpu", "host", failed=host.reason))
    return done


def _checked(planner: Planner, plan: Plan, start: StartModel, demand: Demand, beside: Demand) -> Checked:
    from relevo.cli.planning.full_load import load_fully
    from relevo.cli.planning.view import options_view
    from relevo.devices.host import default_threads

    cpu = start.route == "cpu"
    one = Checked(start.route, plan.host_target.name if cpu else plan.sizing.target.name, options_view(start))
    try:
        threads = plan.sizing.model.threads or default_threads()
        start = replace(start, libraries=str(planner.libraries()), threads=threads)
        device = None if cpu else _open(planner, plan)
        try:
            one.load = load_fully(start, device)
        finally:
            if device is not None:
                device.stop()
    except RelevoError as error:
        one.failed = error.message
        return one
    on_card = device is not None and not device.emulated
    one.rows = (
        card_rows(demand, beside, one.load) if on_card else process_rows(demand, beside, one.load, emulated=not cpu)
    )
    return one


def _open(planner: Planner, plan: Plan) -> Device:
    """The device, to be asked what is used of it. Raises DeviceError."""
    from relevo.config import DeviceConfig
    from relevo.devices.ggml import inspect
    from relevo.service.house import open_device

    name = plan.sizing.target.name
    described = planner.config.devices.get(name, DeviceConfig(kind="auto"))
    libraries = planner.libraries()
    return open_device(name, described, inspect(libraries), libraries, planner.paths)


def process_rows(demand: Demand, beside: Demand, load: FullLoad, *, emulated: bool) -> list[Row]:
    """Of a worker that computes on the CPU: all its memory is its process's.

    On an emulated device what is reserved and not used counts too, because the kernel bounds reservations.
    """
    ready, seen = load.ready, load.observed
    own = demand.known_bytes - _margin(demand)
    whole = own + demand.spent_bytes + beside.known_bytes - (RESERVED_BYTES if emulated else 0)
    reserved = own if emulated else None
    return [
        *_engine_rows(demand, load, mapped_bytes=beside.mapped_bytes),
        Row("output", demand.output_bytes, ready.output_bytes),
        Row("the whole process", whole, None, seen.resident_bytes, "kernel, VmHWM"),
        Row("of it its own", None, None, seen.anonymous_bytes, "kernel, most RssAnon"),
        Row("its own, as reserved", reserved, None, seen.reserved_bytes, "kernel, most VmData"),
    ]


def card_rows(demand: Demand, beside: Demand, load: FullLoad) -> list[Row]:
    """Of a worker with layers on a card: the driver sees what the card holds, the kernel the rest."""
    ready, seen = load.ready, load.observed
    reported = (ready.model_bytes, ready.kv_bytes, ready.state_bytes, ready.compute_bytes)
    buffers = sum(part or 0 for part in reported)
    beyond = None if seen.device_bytes is None else seen.device_bytes - buffers
    learned = sum(part or 0 for part in (demand.context_bytes, demand.pool_bytes, demand.fragmentation_bytes))
    witness = "driver, of the process" if seen.by_process else "driver, rise of use"
    if seen.device_bytes is None:
        witness = "the driver does not tell it"
    host_compute = Row("compute on the host", beside.compute_bytes, ready.host_compute_bytes)
    return [
        *_engine_rows(demand, load),
        Row("driver, pool, fragmentation", learned, None, beyond, witness),
        Row("all on the card", demand.known_bytes - _margin(demand), None, seen.device_bytes, witness),
        *([host_compute] if ready.host_compute_bytes is not None else []),
        Row("the whole process", beside.known_bytes - _margin(beside), None, seen.resident_bytes, "kernel, VmHWM"),
    ]


def _engine_rows(demand: Demand, load: FullLoad, mapped_bytes: int = 0) -> list[Row]:
    """The parts that the engine prints. `mapped_bytes`: weights that are booked elsewhere, and printed here."""
    ready = load.ready
    weights = ready.model_bytes
    if weights is not None and ready.device == "cpu":
        weights += ready.repacked_bytes or 0
    rows = [
        Row("weights", None if demand.weights_bytes is None else demand.weights_bytes + mapped_bytes, weights),
        Row("KV cache", demand.kv_bytes, ready.kv_bytes),
        Row("compute buffer", demand.compute_bytes, ready.compute_bytes),
    ]
    if demand.state_bytes or ready.state_bytes:
        rows.insert(2, Row("state", demand.state_bytes, ready.state_bytes))
    return rows


def _margin(demand: Demand) -> int:
    return demand.margin_bytes or 0
