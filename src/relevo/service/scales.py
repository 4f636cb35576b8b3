"""The scales of one route: what a load will take, by the best that is known of it.

Closed form first; where it does not know a part, the engine's own dry run; margins and what no header tells are
learned from loads of the same kind on this machine. Unknown stays unknown: then a load is not started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from relevo.core.described import Described
from relevo.core.events import StartModel
from relevo.core.memory import learned
from relevo.core.memory.demand import DEVICE_START, MIB, Demand, DeviceStart, load_options, model_demand
from relevo.core.memory.dry_run import DryRunAnswer, DryRunFigures, DryRunRefused, wants_dry_run, with_dry_run
from relevo.core.memory.learned import CARD_FLOORS, SMALL_FLOORS, Basis, Learned
from relevo.core.memory.load import COPIES_CACHE, VOCABULARY_BYTES_A_TOKEN
from relevo.core.memory.repack import X86_TYPES
from relevo.core.memory.shape import ModelShape
from relevo.core.memory.tier import Tier
from relevo.service.plans import RESERVED_BYTES

_ANY_CHUNK_TOKENS = 64
"""Prompt chunks take no memory of their own; two loads that differ in nothing else are weighed as one."""


class Place(Described):
    """Where a route's worker has its memory."""

    HOST = "host", "In RAM: the CPU route."
    EMULATED = "emulated", "In RAM, which plays an accelerator: all private memory of the process counts."
    CARD = "card", "On a real card, with a part in RAM."


_RAM_START = {
    Place.HOST: DeviceStart(context_bytes=48 * MIB, pool_bytes=0, margin_bytes=32 * MIB),
    Place.EMULATED: DeviceStart(context_bytes=48 * MIB + RESERVED_BYTES, pool_bytes=0, margin_bytes=32 * MIB),
}
"""What a worker's process takes in RAM before this machine has taught better."""


Lessons = Callable[[StartModel, Tier], Learned]
"""What a load is to be charged beside its predicted parts; the tier is that of the prediction."""


def first_charge(place: Place, kind: str) -> tuple[DeviceStart, Mapping[Tier, int]]:
    """(what a kind of device is charged before this machine has taught better, the least margins by tier)."""
    if place is Place.CARD:
        return DEVICE_START.get(kind, DEVICE_START["vulkan"]), CARD_FLOORS
    return _RAM_START[place], SMALL_FLOORS


def untaught(place: Place, kind: str = "") -> Lessons:
    """Where nothing was learned, or what was learned is out of reach."""
    first, floors = first_charge(place, kind)
    nothing = learned.Lessons()
    key, under = learned.Key(model="", device="", options=""), learned.Circumstances("", "", "")
    return lambda _start, tier: nothing.learned(key, under, predicted_by=tier, start=first, floors=floors)


class Scales:
    """Weighs loads of one model in one place. `lessons` is asked each time, because more is learned meanwhile.

    `kind`: of the card, as devices name it. `repacked`: number types that this machine's CPU keeps in another order.
    """

    def __init__(
        self,
        shape: ModelShape,
        place: Place,
        lessons: Lessons,
        *,
        kind: str = "",
        repacked: frozenset[str] = X86_TYPES,
    ) -> None:
        self.shape = shape
        self.place = place
        self._lessons = lessons
        self._copies_cache = kind in COPIES_CACHE
        self._repacked = repacked
        self._answers: dict[StartModel, DryRunAnswer] = {}
        self._unknown: dict[StartModel, None] = {}

    @property
    def unknown(self) -> list[StartModel]:
        """Loads that were asked for and could not be weighed: the engine may tell."""
        return list(self._unknown)

    def weigh(self, start: StartModel) -> tuple[Demand, Demand]:
        """(what it takes of the route's device, what it takes of the host besides)."""
        load = same_load(start)
        answer = self._answers.get(load)
        charge = self._lessons(start, _predicted_by(answer))
        on_card = self.place is Place.CARD
        options = load_options(
            start,
            on_device=on_card,
            learned=charge.start,
            fragmentation_bytes=charge.fragmentation_bytes,
            copies_cache=self._copies_cache,
            repacked_types=self._repacked,
        )
        device, host = model_demand(self.shape, options)
        if isinstance(answer, DryRunFigures):
            weighed = with_dry_run(device, host, answer)
            device, host = weighed.device, weighed.host
        pair = (device, host) if on_card else self._in_ram(host, charge)
        if isinstance(answer, DryRunRefused):
            return _refused(pair[0], answer), _refused(pair[1], answer)
        if answer is None and wants_dry_run(*pair):
            self._unknown[load] = None
        return pair

    def learned(self, start: StartModel) -> Learned:
        """What loads like this one have taught here."""
        return self._lessons(start, _predicted_by(self._answers.get(same_load(start))))

    def tier(self, start: StartModel) -> Tier:
        """Where the figures of `weigh` come from."""
        return self.learned(start).tier

    def learn(self, start: StartModel, answer: DryRunAnswer) -> None:
        """What the engine said of this load, or why it could not."""
        load = same_load(start)
        self._answers[load] = answer
        self._unknown.pop(load, None)

    def _in_ram(self, host: Demand, charge: Learned) -> tuple[Demand, Demand]:
        """Of a worker without a card. On an emulated device pages of the file stay in what plays the host."""
        mapped = host.mapped_bytes if self.place is Place.EMULATED else 0
        device = msgspec.structs.replace(
            host,
            weights_bytes=None if host.weights_bytes is None else host.weights_bytes - mapped,
            mapped_bytes=host.mapped_bytes - mapped,
            context_bytes=self._process_bytes(charge),
            pool_bytes=charge.pool_bytes or 0,
            fragmentation_bytes=charge.fragmentation_bytes,
            margin_bytes=charge.margin_bytes,
        )
        return device, Demand(weights_bytes=mapped, mapped_bytes=mapped)

    def _process_bytes(self, charge: Learned) -> int:
        """What the worker's process takes itself. Another model's load says nothing of this one's vocabulary."""
        if charge.basis is Basis.KEY:
            return charge.context_bytes
        start = first_charge(self.place, "")[0].context_bytes
        return max(charge.context_bytes, start + VOCABULARY_BYTES_A_TOKEN * self.shape.vocabulary_tokens)


def _predicted_by(answer: DryRunAnswer | None) -> Tier:
    return Tier.DRY_RUN if isinstance(answer, DryRunFigures) else Tier.CLOSED_FORM


def _refused(demand: Demand, answer: DryRunRefused) -> Demand:
    """The parts that stay unknown, with what the engine said to them."""
    reasons = {
        part: f"{why} The engine could not tell either: {answer.message}" for part, why in demand.reasons.items()
    }
    return msgspec.structs.replace(demand, reasons=reasons)


def same_load(start: StartModel) -> StartModel:
    """What two starts have in common that take the same memory."""
    return msgspec.structs.replace(start, model="", route="", prefill_chunk_tokens=_ANY_CHUNK_TOKENS)
