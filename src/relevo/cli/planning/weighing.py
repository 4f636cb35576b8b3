"""What loads of one model take: by the closed form, and where it does not know a part, by the engine's dry run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from relevo.devices.host import cpu_repacks
from relevo.service.scales import Lessons, Place, Scales, untaught

if TYPE_CHECKING:
    from relevo.core.events import StartModel
    from relevo.core.memory.demand import Demand
    from relevo.core.memory.dry_run import DryRunAnswer, DryRunFigures
    from relevo.core.memory.learned import Learned
    from relevo.core.memory.shape import ModelShape
    from relevo.core.memory.tier import Tier

_MONOTONE = ("context_tokens", "slots", "ubatch_tokens", "batch_tokens")
"""Options of which more never makes a part smaller."""
_FIXED = ("profile", "kv_type", "flash_attention", "gpu_layers", "host_expert_layers")
"""Options that must be the same for one load to bound another."""
_DEVICE_PARTS = {"kv_bytes": "kv_bytes", "state_bytes": "state_bytes", "compute_bytes": "compute_bytes"}
_HOST_PARTS = {
    "kv_bytes": "host_kv_bytes",
    "state_bytes": "host_state_bytes",
    "compute_bytes": "host_compute_bytes",
    "output_bytes": "output_bytes",
}
"""Part of a demand -> field of the dry run's figures."""


def place_of(kind: str) -> Place:
    """Where the worker of a load on this kind of device has its memory."""
    return {"host": Place.HOST, "emulated": Place.EMULATED}.get(kind, Place.CARD)


class Weighing:
    """The scales of one model in one place: the service's own, and bounds for what they do not know.

    The service asks the engine about every load that its ladder comes by; a plan has no time for that, so two planned
    loads bound all that take less. `weigh` is what the ladder calls.
    """

    def __init__(
        self, shape: ModelShape, kind: str, lessons: Lessons | None = None, host_lessons: Lessons | None = None
    ) -> None:
        self.planned: list[tuple[StartModel, DryRunFigures]] = []
        """Loads that the engine itself has planned."""
        self.reasons: list[str] = []
        """Why there are no figures of the engine although they are needed."""
        self._on_card = kind not in ("emulated", "host")
        repacked = cpu_repacks()
        self._host = Scales(shape, Place.HOST, host_lessons or untaught(Place.HOST), repacked=repacked)
        place = place_of(kind)
        on_device = Scales(shape, place, lessons or untaught(place, kind), kind=kind, repacked=repacked)
        self._device = self._host if kind == "host" else on_device

    def weigh(self, start: StartModel) -> tuple[Demand, Demand]:
        """(of its device, of the host besides); of a CPU route all is in the first."""
        device, host = self._scales(start).weigh(start)
        on_card = self._on_card and start.route != "cpu"
        first = _DEVICE_PARTS if on_card else _HOST_PARTS
        return (
            self._filled(device, start, first, on_card=on_card),
            self._filled(host, start, _HOST_PARTS, on_card=on_card),
        )

    def knows(self, start: StartModel) -> bool:
        """Whether no part of this load is unknown."""
        return all(demand.total_bytes is not None for demand in self.weigh(start))

    def tier(self, start: StartModel) -> Tier:
        """Where its figures come from."""
        return self._scales(start).tier(start)

    def learned(self, start: StartModel) -> Learned:
        """What loads like this one have taught here."""
        return self._scales(start).learned(start)

    def learn(self, start: StartModel, figures: DryRunFigures) -> None:
        """What the engine said of this load."""
        self.planned.append((start, figures))
        self._scales(start).learn(start, figures)

    @property
    def unknown(self) -> list[StartModel]:
        """Loads on the device that the ladder came by and nobody could weigh; their names and routes are left out."""
        return self._device.unknown

    def answer(self, start: StartModel, figures: DryRunAnswer) -> None:
        """What the engine said of one of `unknown`."""
        self._device.learn(start, figures)

    def _scales(self, start: StartModel) -> Scales:
        return self._host if start.route == "cpu" else self._device

    def _filled(self, demand: Demand, start: StartModel, fields: dict[str, str], *, on_card: bool) -> Demand:
        """The demand with the engine's figures, or bounds by them, for what the closed form does not know."""
        found: dict[str, int] = {}
        for part in demand.reasons:
            bound = self._bound(start, fields[part], on_card=on_card) if part in fields else None
            if bound is not None:
                found[part] = bound
        if not found:
            return demand
        reasons = {part: why for part, why in demand.reasons.items() if part not in found}
        return msgspec.structs.replace(demand, **found, reasons=reasons)

    def _bound(self, start: StartModel, field_name: str, *, on_card: bool) -> int | None:
        """The least that a planned load with as much of everything takes; between two contexts, the line between.

        A buffer grows with the context as the largest of several straight lines, so the line between two of its
        points never lies below it.
        """
        others = [
            (planned.context_tokens, int(getattr(figures, field_name)), planned)
            for planned, figures in self.planned
            if (planned.device != "cpu") == on_card and all(getattr(planned, f) == getattr(start, f) for f in _FIXED)
        ]
        above = [o for o in others if all(getattr(o[2], f) >= getattr(start, f) for f in _MONOTONE)]
        if not above:
            return None
        tokens, value, nearest = min(above, key=lambda other: other[0])
        below = [
            o
            for o in others
            if o[0] < start.context_tokens and all(getattr(o[2], f) == getattr(nearest, f) for f in _MONOTONE[1:])
        ]
        if not below or tokens == start.context_tokens:
            return value
        low_tokens, low_value, _ = max(below, key=lambda other: other[0])
        share = (start.context_tokens - low_tokens) / (tokens - low_tokens)
        return -int(-(low_value + (value - low_value) * share) // 1)
