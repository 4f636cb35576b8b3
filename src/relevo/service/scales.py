"""The scales of one route: what a load will take, by the best that is known of it.

Closed form first; where it does not know a part, the engine's own dry run; margins and what no header tells are
learned from loads of the same kind on this machine. Unknown stays unknown: then a load is not started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from relevo.core.demand import DEVICE_START, Demand, DeviceStart, load_options, model_demand
from relevo.core.described import Described
from relevo.core.dry_run import DryRunAnswer, DryRunFigures, DryRunRefused, with_dry_run
from relevo.core.events import StartModel
from relevo.core.shape import ModelShape
from relevo.core.tier import Tier
from relevo.service.plans import RESERVED_BYTES

_ANY_CHUNK_TOKENS = 64
"""Prompt chunks take no memory of their own; two loads that differ in nothing else are weighed as one."""


class Place(Described):
    """Where a route's worker has its memory."""

    HOST = "host", "In RAM: the CPU route."
    EMULATED = "emulated", "In RAM, which plays an accelerator: all private memory of the process counts."
    CARD = "card", "On a real card, with a part in RAM."


@dataclass(frozen=True, slots=True)
class Lessons:
    """What this machine taught about a kind of load on one device."""

    start: DeviceStart
    fragmentation_bytes: int = 0
    observations: int = 0


class Scales:
    """Weighs loads of one model in one place. `lessons` is asked each time, because more is learned meanwhile."""

    def __init__(self, shape: ModelShape, place: Place, lessons: Callable[[StartModel], Lessons]) -> None:
        self.shape = shape
        self.place = place
        self._lessons = lessons
        self._answers: dict[StartModel, DryRunAnswer] = {}
        self._unknown: dict[StartModel, None] = {}

    @property
    def unknown(self) -> list[StartModel]:
        """Loads that were asked for and could not be weighed: the engine may tell."""
        return list(self._unknown)

    def weigh(self, start: StartModel) -> tuple[Demand, Demand]:
        """(what it takes of the route's device, what it takes of the host besides)."""
        lessons = self._lessons(start)
        on_card = self.place is Place.CARD
        options = load_options(
            start, on_device=on_card, learned=lessons.start, fragmentation_bytes=lessons.fragmentation_bytes
        )
        device, host = model_demand(self.shape, options)
        answer = self._answers.get(same_load(start))
        if isinstance(answer, DryRunFigures):
            weighed = with_dry_run(device, host, answer)
            device, host = weighed.device, weighed.host
        pair = (device, host) if on_card else self._in_ram(host, lessons)
        if isinstance(answer, DryRunRefused):
            return _refused(pair[0], answer), _refused(pair[1], answer)
        if answer is None and any(demand.total_bytes is None for demand in pair):
            self._unknown[same_load(start)] = None
        return pair

    def lessons_of(self, start: StartModel) -> Lessons:
        """What is known of loads like this one."""
        return self._lessons(start)

    def tier(self, start: StartModel) -> Tier:
        """Where the figures of `weigh` come from."""
        if self._lessons(start).observations:
            return Tier.LEARNED
        return Tier.DRY_RUN if isinstance(self._answers.get(same_load(start)), DryRunFigures) else Tier.CLOSED_FORM

    def learn(self, start: StartModel, answer: DryRunAnswer) -> None:
        """What the engine said of this load, or why it could not."""
        self._answers[same_load(start)] = answer
        self._unknown.pop(same_load(start), None)

    def _in_ram(self, host: Demand, lessons: Lessons) -> tuple[Demand, Demand]:
        if self.place is Place.HOST:
            return msgspec.structs.replace(host, margin_bytes=lessons.start.margin_bytes), Demand()
        # An emulated hybrid keeps its weights mapped, in what plays the host; all else is on what plays the device.
        mapped = host.mapped_bytes
        device = msgspec.structs.replace(
            host,
            weights_bytes=None if host.weights_bytes is None else host.weights_bytes - mapped,
            mapped_bytes=0,
            context_bytes=(host.context_bytes or 0) + RESERVED_BYTES,
            fragmentation_bytes=lessons.fragmentation_bytes,
            margin_bytes=(host.margin_bytes or 0) + lessons.start.margin_bytes,
        )
        return device, Demand(weights_bytes=mapped, mapped_bytes=mapped)


def _refused(demand: Demand, answer: DryRunRefused) -> Demand:
    """The parts that stay unknown, with what the engine said to them."""
    reasons = {
        part: f"{why} The engine could not tell either: {answer.message}" for part, why in demand.reasons.items()
    }
    return msgspec.structs.replace(demand, reasons=reasons)


def same_load(start: StartModel) -> StartModel:
    """What two starts have in common that take the same memory."""
    return msgspec.structs.replace(start, model="", route="", prefill_chunk_tokens=_ANY_CHUNK_TOKENS)


def first_lessons(kind: str) -> Lessons:
    """What a kind of device is charged before it has taught better."""
    return Lessons(DEVICE_START.get(kind, DEVICE_START["vulkan"]))
