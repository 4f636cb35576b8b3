"""From a configuration to the house it describes: devices, models, routes and the workers behind them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from relevo.config import Config, DeviceConfig, ModelConfig
from relevo.core.breaker import Breaker, BreakerRecord
from relevo.core.demand import DEVICE_START, ModelShape, load_options, model_demand
from relevo.core.errors import ConfigError, DeviceError
from relevo.core.events import StartModel, StartText
from relevo.core.forecast import Forecast
from relevo.core.ledger import Ledger
from relevo.devices.device import Device
from relevo.devices.ggml import EngineDevice, EngineFacts, inspect
from relevo.devices.host import HostDevice, default_threads
from relevo.devices.nvidia import NvidiaDevice
from relevo.devices.soft import SoftDevice
from relevo.devices.variants import cpu_variant
from relevo.journal import Journal, WorkerStarted
from relevo.models.gguf import read_header
from relevo.models.shape import shape_of
from relevo.replicas.process import Identity
from relevo.replicas.replica import Replica, ReplicaSettings
from relevo.replicas.text import TextProcess
from relevo.service.dispatcher import Dispatcher
from relevo.service.fleet import BREAKER_FACT, Berth, Fleet, Footprint, HeldDevice
from relevo.service.identity import Identities
from relevo.service.metrics import Metrics
from relevo.service.paths import Paths
from relevo.service.records import log_failure
from relevo.service.routes import Placement, Route, ServedModel
from relevo.service.service import RelevoService
from relevo.service.status import StatusBoard
from relevo.setup.libraries import find as find_libraries

HOST = "host"
ENGINE_ENVIRONMENT = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The engine then numbers NVIDIA cards as the driver's management library does."""
PROCESS_BYTES = 512 * 2**20
"""Bound on a worker's private memory besides the model: interpreter, libraries, arenas, thread stacks, as reserved."""
RESERVED_BYTES = 128 * 2**20
"""What a worker reserves beyond what is resident; an emulated accelerator counts it. Seen: 30 MiB beyond the plan."""


@dataclass(slots=True)
class House:
    """A built service, not yet running."""

    config: Config
    journal: Journal
    metrics: Metrics
    models: dict[str, ServedModel]
    dispatcher: Dispatcher
    fleet: Fleet
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


async def build_house(config: Config, paths: Paths, journal: Journal, tasks: asyncio.TaskGroup) -> House:
    """Make everything, start nothing. Raises StartupError where a file, library or device cannot be used."""
    builder = _Builder(config, paths, journal, tasks)
    await builder.add_devices()
    for name, model in config.models.items():
        await builder.add_model(name, model)
    return builder.house


class _Builder:
    """Puts the parts together in the order in which they need each other."""

    def __init__(self, config: Config, paths: Paths, journal: Journal, tasks: asyncio.TaskGroup) -> None:
        self._config = config
        self._paths = paths
        self._journal = journal
        self._libraries = find_libraries(config.engine.libraries)
        self._facts: EngineFacts  # of `add_devices`
        metrics = Metrics()
        models: dict[str, ServedModel] = {}
        board = StatusBoard(models, metrics, lambda: journal.trouble)
        dispatcher = Dispatcher(
            journal, metrics, clock=time.monotonic, wall=time.time, retention_s=config.journal.retention_s, plan=board
        )
        self._tasks = tasks
        self._identities = Identities(journal, paths.state)
        fleet = Fleet(journal, dispatcher, metrics, tasks, identities=self._identities, changed=board.touch)
        board.fleet = fleet
        service = RelevoService(config, models, dispatcher, journal, board, metrics)
        self.house = House(config, journal, metrics, models, dispatcher, fleet, board, service)

    # ------------------------------------------------------------------ devices

    async def add_devices(self) -> None:
        """The host, and every device that a model names."""
        self._facts = await asyncio.to_thread(inspect, self._libraries)
        host = self._config.host
        await self._hold(HostDevice(), declared=host.budget_bytes, headroom=self._floor(host.floor_bytes))
        named = {m.device for m in self._config.models.values() if m.device is not None}
        for name in sorted(named):
            described = self._config.devices[name]
            device = open_device(name, described, self._facts, self._libraries, self._paths)
            await self._hold(device, declared=described.total_bytes, headroom=described.headroom_bytes)

    @staticmethod
    def _floor(configured: int | None) -> int | None:
        """MemAvailable never to go below: the larger of a tenth of RAM and 2 GiB, but at most a quarter of it."""
        total = HostDevice().read().total_bytes
        if configured is not None or total is None:
            return configured
        return min(max(total // 10, 2 << 30), total // 4)

    async def _hold(self, device: Device, *, declared: int | None, headroom: int | None) -> None:
        ledger = Ledger(device.name, declared_bytes=declared, headroom_bytes=headroom)
        ledger.observe(device.read())
        breaker = Breaker(device.name)
        remembered = await self._journal.fact(BREAKER_FACT + device.name)
        if remembered is not None:
            record = msgspec.json.decode(remembered, type=BreakerRecord)
            breaker.restore(record.shifted(time.monotonic() - time.time()))
        self.house.fleet.devices[device.name] = HeldDevice(device.name, device, ledger, breaker)

    # ------------------------------------------------------------------- models

    async def add_model(self, name: str, config: ModelConfig) -> None:
        """A model with its text process and its routes. Raises ModelFileError."""
        path = await asyncio.to_thread(Path(config.path).expanduser)
        header = await asyncio.to_thread(read_header, path)
        text = TextProcess(
            name,
            plan=lambda: StartText(
                model=name, path=str(path), libraries=str(self._libraries), chat_template=read_template(config)
            ),
            on_starting=self._text_starts,
        )
        model = ServedModel(name, config, header, text, created=path.stat().st_mtime)
        self.house.models[name] = model
        self._identities.learn(model, self._tasks)
        forecast = Forecast()
        shape = shape_of(header)
        cpu_plan = self._cpu_plan(name, config, path)
        if config.device is not None:
            held = self.house.fleet.devices[config.device]
            plan = self._gpu_plan(name, config, held, cpu_plan)
            self._add_route(model, plan, held, forecast, footprint_on(held, shape, plan))
        self._add_route(model, cpu_plan, self.house.fleet.devices[HOST], forecast, footprint_on_host(shape, cpu_plan))
        self._order_starts(model)

    def _cpu_plan(self, name: str, config: ModelConfig, path: Path) -> StartModel:
        emulated = config.device is not None and self.house.fleet.devices[config.device].emulated
        # Threads wait for each other actively: two workers that share the cores must share them out.
        threads = config.threads or max(1, default_threads() // (2 if emulated else 1))
        return StartModel(
            model=name,
            route="cpu",
            path=str(path),
            libraries=str(self._libraries),
            context_tokens=config.cpu_context_tokens or config.context_tokens,
            slots=config.cpu_slots or config.slots,
            batch_tokens=config.batch_tokens,
            ubatch_tokens=config.ubatch_tokens,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            kv_type="q8_0" if config.profile == "strict" else config.kv_type,
            flash_attention=config.flash_attention,
            profile=config.profile,
            threads=threads,
            repack=config.profile == "fast",
        )

    def _gpu_plan(self, name: str, config: ModelConfig, held: HeldDevice, cpu: StartModel) -> StartModel:
        layers = shape_of(self.house.models[name].header).layers + 1
        whole = msgspec.structs.replace(
            cpu,
            route="gpu" if held.emulated or config.gpu_layers >= layers else "hybrid",
            context_tokens=config.context_tokens,
            slots=config.slots,
            profile="fast" if not held.emulated else cpu.profile,
        )
        if not held.emulated:
            return msgspec.structs.replace(
                whole, device=held.device.engine_device, gpu_layers=min(config.gpu_layers, layers)
            )
        described = self._config.devices[held.name]
        variant = cpu_variant(
            self._facts.best_cpu_variant, self._facts.cpu_variants, equal_arithmetic=described.equal_arithmetic
        )
        return msgspec.structs.replace(whole, cpu_variant=variant, use_mmap=False)

    def _add_route(
        self, model: ServedModel, plan: StartModel, held: HeldDevice, forecast: Forecast, footprint: Footprint
    ) -> None:
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
        route.replica = Replica(
            f"{model.name}/{plan.route}",
            model=model.name,
            route=plan.route,
            device=held.name,
            kind="llama",
            plan=lambda: plan,
            events=fleet,
            settings=ReplicaSettings(extra_environment=ENGINE_ENVIRONMENT),
        )
        model.routes[plan.route] = route
        self.house.dispatcher.routes[model.name, plan.route] = route
        fleet.berths[route.replica.name] = Berth(route, model, held, footprint)

    def _order_starts(self, model: ServedModel) -> None:
        """The CPU twin is warm before the accelerator is asked for anything."""
        berths = [self.house.fleet.berths[r.replica.name] for r in model.routes.values()]
        for berth in berths[:-1]:
            berth.waits_for = berths[-1]

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
    cards = facts.cards
    if not cards:
        raise DeviceError(
            f"Device {name}: the engine's libraries see no accelerator here. `relevo doctor` shows what is missing. "
            'Without a card, serve from the CPU alone: write device = "" in the model.'
        )
    card = cards[0]
    if card.name.startswith("CUDA"):
        nvidia = NvidiaDevice(name, index=int(card.name.removeprefix("CUDA") or 0))
        nvidia.start()
        return nvidia
    watched = EngineDevice(name, card, lambda: inspect(libraries), declared_bytes=described.total_bytes)
    watched.start()
    return watched


def footprint_on_host(shape: ModelShape, plan: StartModel) -> Footprint:
    """What a worker on the CPU takes: mapped weights count in the lease, but not against its private memory."""
    _, host = model_demand(shape, load_options(plan, on_device=False, learned=DEVICE_START["cpu"]))
    weights = host.weights_bytes or 0
    private = host.known_bytes - weights + PROCESS_BYTES + (weights if plan.repack or not plan.use_mmap else 0)
    unknown = weights // 4 if host.total_bytes is None else 0  # a compute buffer without a closed form
    return Footprint(host.known_bytes + unknown, private + private // 4 + unknown)


def footprint_on(held: HeldDevice, shape: ModelShape, plan: StartModel) -> Footprint:
    """What a worker takes on its accelerator. Emulated: all of its private memory, as the kernel counts it."""
    if held.emulated:
        on_host = footprint_on_host(shape, plan)
        return Footprint(on_host.lease_bytes + RESERVED_BYTES, None)
    learned = DEVICE_START.get(str(held.device.kind), DEVICE_START["vulkan"])
    device, _ = model_demand(shape, load_options(plan, on_device=True, learned=learned))
    unknown = (device.weights_bytes or 0) // 4 if device.total_bytes is None else 0
    return Footprint(device.known_bytes + unknown, None)
