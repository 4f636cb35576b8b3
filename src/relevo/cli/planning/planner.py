"""Makes a plan: reads the header, weighs the load, asks the ladder for every device, and says what each place costs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from dataclasses import replace as replace_sizing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from relevo.cli.planning.lessons import Recalled
from relevo.cli.planning.places import StoragePlace, places_of
from relevo.cli.planning.sizing import Sizing, find_model, model_config, read_model, size_up
from relevo.cli.planning.targets import choose_target, targets_now
from relevo.cli.planning.weighing import Weighing, place_of
from relevo.core.loads.ladder import decide_load, largest_context
from relevo.core.loads.reduction import changes_between
from relevo.core.loads.room import Scales as LadderScales
from relevo.core.loads.room import room_of, why_not
from relevo.core.loads.verdict import Step
from relevo.core.memory.dry_run import ASKED_AT_ONCE, ROUNDS, STAND_IN, STAND_IN_CUDA, STAND_INS, DryRunFigures
from relevo.core.memory.load import COPIES_CACHE
from relevo.service.plans import hybrid_plan
from relevo.service.scales import Place

if TYPE_CHECKING:
    from relevo.cli.place import ServicePlace
    from relevo.cli.planning.targets import Target
    from relevo.config import Config
    from relevo.core.events import StartModel
    from relevo.core.loads.verdict import LoadVerdict
    from relevo.core.loads.wish import LoadWish
    from relevo.core.memory.demand import Demand
    from relevo.core.memory.dry_run import DryRunAnswer
    from relevo.core.memory.learned import Learned
    from relevo.core.memory.tier import Tier
    from relevo.devices.ggml import EngineFacts

_MOST_PLANNED_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Fits:
    """One device, and what the ladder says of this load there."""

    target: Target
    verdict: LoadVerdict
    need_bytes: int | None
    max_context_tokens: int | None
    """With all else as asked; None: not known, as `max_context_reason` says."""
    max_context_reason: str | None = None
    max_context_q8_tokens: int | None = None
    """The same with a KV cache of q8_0; None: not known, or that is what was asked for."""
    runs_from_storage: bool = False
    """Refused, but with weights read from storage again and again it would run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that `relevo plan` says."""

    sizing: Sizing
    tier: Tier
    engine_reason: str | None
    """Why the engine's dry run did not give what the formulas do not know."""
    learned: Learned
    """What earlier loads here taught of such a one."""
    lessons_reason: str | None
    """Why what loads taught here is not in the figures, where there may be something."""
    device: Demand
    """Of what it is loaded on; of a CPU route, the host."""
    host: Demand
    """Of the host, beside a card."""
    cpu: Demand
    asked: Fits
    """What the ladder says on the device that is asked about."""
    fits: tuple[Fits, ...]
    """Every device with a memory: the one that is asked about first. Of the host, the CPU route."""
    host_target: Target
    places: tuple[StoragePlace, ...]
    """Where the weights would lie; empty where all fit on the device, or in RAM."""


class Planner:
    """Plans loads for one place: its configuration, its devices."""

    def __init__(self, place: ServicePlace, *, config_may_be_missing: bool = False) -> None:
        self.paths = place.paths()
        self.config: Config = place.load(may_be_missing=config_may_be_missing)
        self._place = place
        self._libraries: Path | None = None

    @cached_property
    def targets(self) -> list[Target]:
        """The host and every device here, with what is free of each."""
        return targets_now(self.config, self._place)

    @cached_property
    def facts(self) -> EngineFacts:
        """What the engine sees here, asked in a process of its own. Raises LibraryError, DeviceError."""
        from relevo.devices.ggml import inspect

        return inspect(self.libraries())

    @cached_property
    def recalled(self) -> Recalled:
        """What earlier loads here taught."""
        return Recalled(self.paths.state, lambda: self.facts)

    @property
    def host(self) -> Target:
        """The machine's own memory."""
        return next(target for target in self.targets if target.is_host)

    def plan(
        self,
        wanted: str,
        wishes: dict[str, Any],
        *,
        device: str | None = None,
        memory_bytes: int | None = None,
        dry_run: bool = True,
    ) -> Plan:
        """The whole plan. Raises ModelFileError for the file, ConfigError for the wishes."""
        name, path, base = find_model(self.config, wanted, str(self.paths.config))
        header, shape = read_model(path)
        model = model_config(header, base, **wishes)
        targets, host = self.targets, self.host
        target = choose_target(targets, device, base.device if base is not None else None, memory_bytes)
        if target.here:  # as it would be configured
            model = replace(model, device=None if target.is_host else target.name)
        asked = size_up(name, header, shape, model, target, cpu_variant=self._cpu_variant(target))
        scales = self._scales(asked, dry_run=dry_run)
        first = _fits(asked, scales, host)
        rows = [first] if target.here or target.total_bytes is not None else []
        for other in targets:
            if other != target:
                elsewhere, there = self._elsewhere(asked, scales, other, dry_run=dry_run)
                rows.append(_fits(elsewhere, there, host))
        demand, beside = scales.weigh(asked.start)
        cpu, _ = scales.weigh(asked.cpu)
        return Plan(
            sizing=asked,
            tier=scales.tier(asked.start),
            engine_reason=" ".join(scales.reasons) or None,
            learned=scales.learned(asked.start),
            lessons_reason=self.recalled.reason,
            device=demand,
            host=beside,
            cpu=cpu,
            asked=first,
            fits=tuple(rows),
            host_target=host,
            places=() if target.available_bytes is None else places_of(asked, first.verdict, host),
        )

    def libraries(self) -> Path:
        """The engine's libraries. Raises LibraryError where they are missing."""
        if self._libraries is None:
            from relevo.setup.libraries import find

            self._libraries = find(self.config.engine.libraries)
        return self._libraries

    def _elsewhere(self, asked: Sizing, scales: Weighing, other: Target, *, dry_run: bool) -> tuple[Sizing, Weighing]:
        """The same model on another device; on the host, the CPU route that it has anyway."""
        if other.is_host:
            return replace_sizing(asked, target=other, gpu=None), scales
        model = replace(asked.model, device=other.name)
        variant = self._cpu_variant(other)
        sized = size_up(asked.name, asked.header, asked.shape, model, other, cpu_variant=variant)
        return sized, scales if other.kind == asked.target.kind else self._scales(sized, dry_run=dry_run)

    def _cpu_variant(self, target: Target) -> str | None:
        """Which CPU library plays this device; only asked where something was learned, which may differ by it."""
        from relevo.core.errors import RelevoError
        from relevo.devices.variants import cpu_variant

        described = self.config.devices.get(target.name)
        if not target.emulated or described is None or not len(self.recalled.lessons):
            return None
        with contextlib.suppress(RelevoError):
            best, there = self.facts.best_cpu_variant, self.facts.cpu_variants
            return cpu_variant(best, there, equal_arithmetic=described.equal_arithmetic)
        return None

    def _scales(self, sizing: Sizing, *, dry_run: bool) -> Weighing:
        """The closed form, and the engine's word for what it does not know."""
        from relevo.core.errors import RelevoError

        target = sizing.target
        lessons = self.recalled.of(target, place_of(target.kind))
        scales = Weighing(sizing.shape, target.kind, lessons, self.recalled.of(self.host, Place.HOST))
        starts = [start for start in dict.fromkeys((sizing.start, sizing.cpu)) if not scales.knows(start)]
        if not starts:
            return scales
        if not dry_run:
            scales.reasons.append("The engine was not asked (--no-dry-run).")
            return scales
        try:
            engine = _Engine(str(self.libraries()), sizing.target)
        except RelevoError as error:
            scales.reasons.append(error.message)
            return scales
        _learn_bounds(sizing, starts, scales, engine)
        if sizing.gpu is not None and scales.knows(sizing.start):
            self._settle(sizing, scales, engine)
        return scales

    def _settle(self, sizing: Sizing, scales: Weighing, engine: _Engine) -> None:
        """Ask the engine about the loads that the ladder comes by, until it knows them all."""
        for _ in range(ROUNDS):
            _decide(sizing, sizing.wish(), self.host, scales)
            unknown = scales.unknown[:ASKED_AT_ONCE]
            if not unknown:
                return
            for start, answer in zip(unknown, engine.ask(unknown), strict=True):
                scales.answer(start, answer)


class _Engine:
    """The engine's dry runs, for one target. For a card that is not here it plans for one of its kind."""

    def __init__(self, libraries: str, target: Target) -> None:
        self._libraries = libraries
        self._stand_in: str | None = None
        if not target.here:
            self._stand_in = STAND_IN_CUDA if target.kind in COPIES_CACHE else STAND_IN

    def ask(self, starts: list[StartModel]) -> list[DryRunAnswer]:
        """What it says of each, in their order. What it said of the same file before is remembered."""
        from relevo.replicas.dry_run import dry_run_now
        from relevo.replicas.dry_run_cache import DryRunCache, EngineIdentity
        from relevo.setup.cache import cache_folder

        wanted = [self._asked(start) for start in starts]
        on_card = any(start.device != "cpu" and start.device not in STAND_INS for start in wanted)
        # Of a card's driver nothing is known here that could tell a remembered answer from a true one.
        cache = None if on_card else DryRunCache(cache_folder() / "dry-runs", EngineIdentity(engine=""))
        return dry_run_now(wanted, cache=cache)

    def _asked(self, start: StartModel) -> StartModel:
        device = start.device if self._stand_in is None or start.device == "cpu" else self._stand_in
        return replace(start, libraries=self._libraries, device=device)


def _learn_bounds(sizing: Sizing, starts: list[StartModel], scales: Weighing, engine: _Engine) -> None:
    """Learn what these loads take, and what they would with the longest context: between them lie all others."""
    most = min(sizing.header.context_trained_tokens or _MOST_PLANNED_TOKENS, _MOST_PLANNED_TOKENS)
    longest = [replace(start, context_tokens=most) for start in starts if start.context_tokens < most]
    for start, answer in zip(wanted := starts + longest, engine.ask(wanted), strict=True):
        if isinstance(answer, DryRunFigures):
            scales.learn(start, answer)
        elif start in starts:
            scales.reasons.append(answer.message)


def _fits(sizing: Sizing, scales: Weighing, host: Target) -> Fits:
    """The ladder's verdict for one device."""
    target, wish = sizing.target, sizing.wish()
    device = target.view()
    verdict = _decide(sizing, wish, host, scales)
    need, _ = scales.weigh(sizing.start)
    reason = None
    if target.available_bytes is None:
        reason = target.reason
    elif need.total_bytes is None:
        reason = next(iter(need.reasons.values()), "A part of what it needs is not known.")
    if reason is not None:
        return Fits(target, verdict, need.total_bytes, None, reason)
    largest = largest_context(wish, device, host.view(), scales.weigh)
    start, smaller = wish.start, None
    if start.kv_type == "f16" and start.profile == "fast":
        quantized = replace(start, kv_type="q8_0", flash_attention=True)
        if scales.knows(quantized):
            smaller = largest_context(replace(wish, start=quantized), device, host.view(), scales.weigh)
    return Fits(
        target, verdict, need.total_bytes, largest, None, smaller, _runs_from_storage(sizing, host, scales, verdict)
    )


def _runs_from_storage(sizing: Sizing, host: Target, scales: Weighing, verdict: LoadVerdict) -> bool:
    if verdict.step is not Step.REJECT or sizing.model.from_storage:
        return False
    slow = _decide(sizing, replace(sizing.wish(), from_storage=True), host, scales)
    return slow.step is not Step.REJECT


def _decide(sizing: Sizing, wish: LoadWish, host: Target, scales: Weighing) -> LoadVerdict:
    """The ladder's verdict. Of an emulated device, which has no layers of its own, the part is a route of its own."""
    device = sizing.target.view()
    verdict = decide_load(wish, device, host.view(), scales.weigh)
    if verdict.loads_on_device or not sizing.target.emulated or not sizing.model.offload or sizing.gpu is None:
        return verdict
    part = replace(wish, start=hybrid_plan(sizing.gpu, emulated=True), offload=False)
    placed = decide_load(part, device, host.view(), scales.weigh)
    if not placed.loads_on_device or not placed.start.use_mmap:
        return verdict
    scales_of_ladder = LadderScales(scales.weigh)
    changes = changes_between(wish, wish.start, placed.start, scales_of_ladder)
    why = why_not(scales_of_ladder.load(wish.start), room_of(device, host.view()), device, host.view())
    reason = " ".join((why, *(change.sentence for change in changes)))
    return replace(placed, step=Step.OFFLOAD, changes=changes, reason=reason)
