"""From a configuration to the house it describes: devices, models, routes and the workers behind them."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from relevo.config import Config, DeviceConfig, ModelConfig
from relevo.core.breaker import Breaker, BreakerRecord
from relevo.core.errors import ConfigError, DeviceError
from relevo.core.events import StartModel, StartText
from relevo.core.forecast import Forecast
from relevo.core.leases.ledger import Ledger
from relevo.core.memory.shape import ModelShape
from relevo.devices.device import Device
from relevo.devices.ggml import EngineDeviceFacts, EngineFacts, inspect
from relevo.devices.host import HostDevice, cpu_repacks, default_threads, floor_bytes
from relevo.devices.opening import open_card
from relevo.devices.soft import SoftDevice
from relevo.devices.variants import cpu_variant
from relevo.journal import Journal, WorkerStarted
from relevo.models.gguf import read_header
from relevo.models.header_cache import FileIdentity
from relevo.models.shape import shape_of
from relevo.processes.identity import Identity
from relevo.replicas.dry_run import DryRuns
from relevo.replicas.dry_run_cache import DryRunCache, EngineIdentity
from relevo.replicas.replica import Replica, ReplicaSettings
from relevo.replicas.text import TextProcess, TextSettings
from relevo.service.berths import Berth, HeldDevice, Posture
from relevo.service.dispatcher import Dispatcher
from relevo.service.fleet import BREAKER_FACT, Fleet
from relevo.service.identity import Identities
from relevo.service.learning import Learning
from relevo.service.lengths import AnswerLengths
from relevo.service.loads import Loads
from relevo.service.metrics import Metrics
from relevo.service.paths import Paths
from relevo.service.plans import cpu_plan, emulated_plan, gpu_plan, hybrid_plan
from relevo.service.records import log_failure
from relevo.service.routes import Placement, Route, ServedModel
from relevo.service.scales import Place, Scales
from relevo.service.service import RelevoService
from relevo.service.status import StatusBoard
from relevo.service.watch import Watch
from relevo.setup.cache import cache_folder
from relevo.setup.libraries import find as find_libraries

HOST = "host"
ENGINE_NAMES = {"nvidia": "CUDA", "vulkan": "Vulkan"}
"""How the engine's names of a configured kind begin."""
DRY_RUNS = "dry-runs"
"""Folder in the cache for what the engine said of loads."""
ROUTE_ORDER = ("gpu", "hybrid", "cpu")
"""As requests prefer them."""
SPILL = "spill"
"""Folder in the state folder for texts under way to a text process; what a crash left there goes at the next start."""
ENGINE_ENVIRONMENT = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The engine then numbers NVIDIA cards as the driver's management library does."""


@dataclass(slots=True)
class House:
    """A built service, not yet running."""

    config: Config
    journal: Journal
    metrics: Metrics
    models: dict[str, ServedModel]
    dispatcher: Dispatcher
    fleet: Fleet
    watch: Watch
    lengths: AnswerLengths
    board: StatusBoard
    service: RelevoService

    def parts(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """What must run: the text processes and the replicas."""
        texts = [(f"text {m.name}", m.text.run()) for m in self.models.values()]
        return [*texts, *((r.replica.name, r.replica.run()) for r in self.dispatcher.routes.values())]

    def governors(self) -> list[Callable[[], object]]:
        """Ticks of the devices whose memory limit is kept from here."""
        return [held.device.tick for held in self.fleet.devices.values() if isinstance(held.device, SoftDevice)]

    async def stop_workers(self) -> None:
        """Stop every worker, all at once, each within its own bounds."""
        async with asyncio.TaskGroup() as stopping:
            for route in self.dispatcher.routes.values():
                stopping.create_task(route.replica.stop())
            for model in self.models.values():
                stopping.create_task(model.text.stop())
        for held in self.fleet.devices.values():
            await asyncio.to_thread(held.device.stop)


async def build_house(config: Config, paths: Paths, journal: Journal, tasks: asyncio.TaskGroup) -> House:
    """Make everything, start nothing. Raises StartupError where a file, library or device cannot be used."""
    await asyncio.to_thread(shutil.rmtree, paths.state / SPILL, ignore_errors=True)
    libraries = find_libraries(config.engine.libraries)
    facts = await asyncio.to_thread(inspect, libraries)
    builder = _Builder(config, paths, journal, tasks, libraries, facts)
    await builder.add_devices()
    for name, model in config.models.items():
        await builder.add_model(name, model)
    await builder.house.lengths.recall()
    return builder.house


class _Builder:
    """Puts the parts together in the order in which they need each other."""

    def __init__(
        self,
        config: Config,
        paths: Paths,
        journal: Journal,
        tasks: asyncio.TaskGroup,
        libraries: Path,
        facts: EngineFacts,
    ) -> None:
        self._config = config
        self._paths = paths
        self._journal = journal
        self._libraries = libraries
        self._facts = facts
        self._repacked = cpu_repacks()
        metrics = Metrics()
        models: dict[str, ServedModel] = {}
        board = StatusBoard(models, metrics, lambda: journal.trouble)
        dispatcher = Dispatcher(
            journal, metrics, clock=time.monotonic, wall=time.time, retention_s=config.journal.retention_s, plan=board
        )
        self._tasks = tasks
        self._identities = Identities(journal, paths.state)
        self._learning = Learning(journal, facts.engine)
        known = EngineIdentity(facts.engine, {d.name: d.description for d in facts.devices})
        loads = Loads(DryRuns(DryRunCache(cache_folder() / DRY_RUNS, known)), board.touch)
        fleet = Fleet(
            journal,
            dispatcher,
            metrics,
            tasks,
            identities=self._identities,
            learning=self._learning,
            loads=loads,
            changed=board.touch,
        )
        board.fleet = fleet
        watch = Watch(fleet, dispatcher, self._learning, board.touch)
        lengths = AnswerLengths(journal, models)
        service = RelevoService(config, models, dispatcher, journal, board, metrics)
        self.house = House(config, journal, metrics, models, dispatcher, fleet, watch, lengths, board, service)

    # ------------------------------------------------------------------ devices

    async def add_devices(self) -> None:
        """The host, and every device that a model names."""
        await self._learning.recall()
        host = self._config.host
        ram = HostDevice()
        floor = floor_bytes(ram.read().total_bytes, host.floor_bytes)
        await self._hold(ram, DeviceConfig(total_bytes=host.budget_bytes, headroom_bytes=floor))
        named = {m.device for m in self._config.models.values() if m.device is not None}
        for name in sorted(named):
            described = self._config.devices[name]
            device = open_device(name, described, self._facts, self._libraries, self._paths)
            await self._hold(device, described)

    async def _hold(self, device: Device, described: DeviceConfig) -> None:
        ledger = Ledger(
            device.name,
            declared_bytes=described.total_bytes,
            headroom_bytes=described.headroom_bytes,
            lag_s=device.lag_s,
            stale_after_s=device.stale_after_s,
        )
        ledger.observe(device.read())
        breaker = Breaker(device.name)
        remembered = await self._journal.fact(BREAKER_FACT + device.name)
        if remembered is not None:
            record = msgspec.json.decode(remembered, type=BreakerRecord)
            breaker.restore(record.shifted(time.monotonic() - time.time()))
        self.house.fleet.devices[device.name] = HeldDevice(
            device.name, device, ledger, breaker, yield_s=described.yield_s
        )

    # ------------------------------------------------------------------- models

    async def add_model(self, name: str, config: ModelConfig) -> None:
        """A model with its text process and its routes. Raises ModelFileError."""
        path = await asyncio.to_thread(Path(config.path).expanduser)
        header = await asyncio.to_thread(read_header, path)
        path = Path(header.path)  # of a model in several files the first, whichever was named
        text = TextProcess(
            name,
            plan=lambda: StartText(
                model=name, path=str(path), libraries=str(self._libraries), chat_template=read_template(config)
            ),
            settings=TextSettings(folder=self._paths.state / SPILL),
            on_starting=self._text_starts,
        )
        model = ServedModel(name, config, header, text, created=path.stat().st_mtime)
        self.house.models[name] = model
        self._identities.learn(model, self._tasks)
        forecast = Forecast()
        shape = shape_of(header)
        held = self.house.fleet.devices[config.device] if config.device is not None else None
        # Threads wait for each other actively: two workers that share the cores must share them out.
        sharers = 2 if held is not None and held.emulated else 1
        cpu = cpu_plan(
            name,
            config,
            path,
            self._libraries,
            on_card=held is not None and not held.emulated,
            threads=max(1, default_threads() // sharers),
        )
        model.flash_attention = cpu.flash_attention
        host = self.house.fleet.devices[HOST]
        in_ram = Scales(shape, Place.HOST, self._learning.lessons(host, Place.HOST), repacked=self._repacked)
        twin = self._add_route(model, cpu, host, forecast, in_ram)
        if held is not None:
            self._add_accelerated(model, cpu, held, forecast, shape)
        self._order_routes(model, twin)

    def _add_accelerated(
        self, model: ServedModel, cpu: StartModel, held: HeldDevice, forecast: Forecast, shape: ModelShape
    ) -> None:
        """The whole model on the device, and, where the configuration allows it, a part of it."""
        config = model.config
        place = Place.EMULATED if held.emulated else Place.CARD
        if held.emulated:
            described = self._config.devices[held.name]
            variant = cpu_variant(
                self._facts.best_cpu_variant, self._facts.cpu_variants, equal_arithmetic=described.equal_arithmetic
            )
            plan = emulated_plan(cpu, config, variant)
        else:
            plan = gpu_plan(cpu, config, shape, held.device.engine_device)
        lessons = self._learning.lessons(held, place)
        scales = Scales(shape, place, lessons, kind=str(held.device.kind), repacked=self._repacked)
        whole = self._add_route(model, plan, held, forecast, scales)
        if config.offload and plan.route == "gpu":
            part = self._add_route(model, hybrid_plan(plan, emulated=held.emulated), held, forecast, scales)
            part.whole, part.posture, whole.has_part = whole, Posture.DORMANT, True

    def _add_route(
        self, model: ServedModel, plan: StartModel, held: HeldDevice, forecast: Forecast, scales: Scales
    ) -> Berth:
        lane = model.config.cpu_lane if plan.route == "cpu" else model.config.gpu_lane
        route = Route(
            plan.route,
            model.name,
            held=Placement(held.name, held.emulated),
            lane=lane,
            pool=(plan.context_tokens, plan.slots, plan.profile == "fast"),
            forecast=forecast,
        )
        fleet = self.house.fleet
        file = FileIdentity.of(Path(plan.path), Path(plan.path))
        berth = Berth(route, model, held, fleet.devices[HOST], plan, scales, file=file)
        route.replica = Replica(
            f"{model.name}/{plan.route}",
            model=model.name,
            route=plan.route,
            device=held.name,
            kind="llama",
            plan=berth.planned,
            events=fleet,
            settings=ReplicaSettings(extra_environment=ENGINE_ENVIRONMENT),
        )
        model.routes[plan.route] = route
        self.house.dispatcher.routes[model.name, plan.route] = route
        fleet.berths[route.replica.name] = berth
        return berth

    def _order_routes(self, model: ServedModel, twin: Berth) -> None:
        """In order of preference; and the CPU twin is warm before the accelerator is asked for anything."""
        model.routes = {name: model.routes[name] for name in ROUTE_ORDER if name in model.routes}
        for route in model.routes.values():
            berth = self.house.fleet.berths[route.replica.name]
            if berth is not twin:
                berth.twin = berth.waits_for = twin

    def _text_starts(self, text: TextProcess, identity: Identity) -> None:
        started = WorkerStarted(
            pid=identity.pid,
            start_time=identity.start_time,
            model=text.model,
            route="text",
            device=HOST,
            at=time.time(),
        )
        self._journal.submit(started).add_done_callback(log_failure(f"the start of the text process of {text.model}"))


def read_template(config: ModelConfig) -> str | None:
    """The template that replaces the file's own. Raises ConfigError where it cannot be read."""
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"The chat template {config.chat_template} cannot be read: {e}.") from None


def open_device(name: str, described: DeviceConfig, facts: EngineFacts, libraries: Path, paths: Paths) -> Device:
    """The device that the configuration describes. A card that cannot be used is an error, never a quiet emulation.

    Raises DeviceError with the reason.
    """
    if described.kind == "emulated":
        assert described.total_bytes is not None  # checked with the configuration
        return SoftDevice(name, described.total_bytes, folder=paths.state / "devices" / name)
    cards = [c for c in facts.cards if c.name.startswith(ENGINE_NAMES.get(described.kind, ""))]
    if not cards:
        seen = ", ".join(f"{c.name} ({c.description})" for c in facts.cards) or "none"
        kind = "" if described.kind == "auto" else f"{described.kind} "
        raise DeviceError(
            f"Device {name}: the engine's libraries see no {kind}accelerator here (seen: {seen}). "
            "`relevo doctor` shows what is missing. "
            'Without a card, serve from the CPU alone: write device = "" in the model.'
        )
    return open_card(
        name, chosen_card(name, described, cards), lambda: inspect(libraries), declared_bytes=described.total_bytes
    )


def chosen_card(name: str, described: DeviceConfig, cards: list[EngineDeviceFacts]) -> EngineDeviceFacts:
    """The one that the configuration names, else the first. Raises DeviceError where there is none of that name."""
    if described.card is None:
        return cards[0]
    for card in cards:
        if described.card in (card.name, card.pci_address):
            return card
    seen = ", ".join(f"{card.name} ({card.pci_address or card.description})" for card in cards)
    raise DeviceError(f"Device {name}: there is no card {described.card!r} here. Seen: {seen}.")
