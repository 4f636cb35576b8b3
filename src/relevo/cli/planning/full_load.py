"""One real load, used to the full: a worker of its own, a prompt near full context, and the memory seen meanwhile.

The worker is driven directly, not through a service, so that every figure is of this load and of nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relevo.core.errors import StartupError
from relevo.core.events import AttemptEnded, Cancel, ChoiceStart, FromWorker, Ready, Sampling, Submit
from relevo.processes import memory
from relevo.replicas.incarnation import Incarnation, LifeSettings
from relevo.replicas.process import ProcessLimits, worker_command, worker_environment

if TYPE_CHECKING:
    from relevo.core.events import StartModel
    from relevo.devices.device import Device

PROMPT_BUDGET_S = 45.0
"""A prompt near full context is run where it takes no longer than this by estimate; a shorter one otherwise."""
PROMPT_LIMIT_S = 60.0
_SLOWER_FAR_OUT = 1.5
"""How much slower a long prompt may be, a token, than a short one: attention looks at all that came before."""
_FIRST_TOKENS = (16, 256)
_MOST_PROMPT_TOKENS = 150_000  # a frame holds no more
_PLAIN_TOKEN = 1000
_POLL_S = 0.05
_LAG_S = 1.5
"""How late a driver's figures may be."""
_STOP_S = 10.0
_GONE_S = 30.0
_ENVIRONMENT = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


class LoadFailed(StartupError):
    """The model could not be loaded or used."""

    code = "load_failed"


@dataclass(slots=True)
class Observed:
    """The most that was seen while the worker lived. None: nobody tells it here."""

    resident_bytes: int | None = None
    """VmHWM: pages of the mapped file included."""
    anonymous_bytes: int | None = None
    """RssAnon: its own memory."""
    reserved_bytes: int | None = None
    """VmData: its own memory, counted when it is reserved."""
    device_bytes: int | None = None
    """What the driver says that the process holds there; where it does not tell, by how much the device's use rose."""
    by_process: bool = False
    """Whether the driver told the process's own."""


@dataclass(frozen=True, slots=True)
class FullLoad:
    """What one load was, in the engine's words and the kernel's."""

    ready: Ready
    load_s: float
    prompt_tokens: int
    prompt_s: float
    near_full: bool
    """Whether the prompt filled the context but for a micro-batch."""
    observed: Observed


def load_fully(start: StartModel, device: Device | None = None) -> FullLoad:
    """Load it, read a prompt as near to full context as a minute allows, end it. Raises LoadFailed with the cause.

    `device`: of a GPU route, for its use before and during; an emulated one keeps its limit.
    """

    async def load() -> FullLoad:
        return await _Load(start, device).run()

    return asyncio.run(load())


class _Load:
    """One worker, from its start to its end."""

    def __init__(self, start: StartModel, device: Device | None) -> None:
        self._start = start
        self._device = device
        self._frames: asyncio.Queue[Any] = asyncio.Queue()
        self._observed = Observed()
        self._used_before = self._device_used()
        settings = LifeSettings(
            command=lambda fd: worker_command("llama", fd),
            environment=worker_environment(start.threads, _ENVIRONMENT),
            incoming=FromWorker,
        )
        self._life = Incarnation(1, f"check of {start.model}", settings, self._frames.put_nowait, lambda _: None)

    async def run(self) -> FullLoad:
        life, started = self._life, time.monotonic()
        try:
            await life.start(ProcessLimits())
            assert life.process is not None
            release = self._occupy(life.process.pid)
            watching = asyncio.create_task(self._watch(life.process.pid))
            try:
                life.send(self._start)
                ready = await self._next(Ready)
                life.ready()
                load_s = time.monotonic() - started
                tokens, took_s, near_full = await self._read_prompts(ready)
                await asyncio.sleep(2 * _POLL_S if self._seen_at_once else _LAG_S)  # a last look at what it holds
            finally:
                watching.cancel()
                release()
                await self._end()
        except OSError as e:
            raise LoadFailed(f"The worker does not start: {e.strerror or e}.") from None
        return FullLoad(ready, load_s, tokens, took_s, near_full, self._observed)

    async def _read_prompts(self, ready: Ready) -> tuple[int, float, bool]:
        """Short prompts tell the speed; then the longest one that the budget and the context allow."""
        full = min(self._start.context_tokens, ready.cells) - 2
        tokens, took_s = 0, 0.0
        for number, wanted in enumerate((*_FIRST_TOKENS, _MOST_PROMPT_TOKENS)):
            affordable = int(tokens / took_s / _SLOWER_FAR_OUT * PROMPT_BUDGET_S) if took_s else wanted
            if affordable <= tokens or tokens == full:
                break
            tokens = min(full, wanted, affordable)
            took_s = max(1e-6, await self._prompt(number, tokens, ready.vocabulary_tokens))
        return tokens, took_s, tokens >= full - self._start.ubatch_tokens

    async def _prompt(self, number: int, tokens: int, vocabulary_tokens: int) -> float:
        """Seconds for a prompt of so many tokens and one token of output. Cut off after the limit."""
        request = f"check-{number}"
        token = min(_PLAIN_TOKEN, vocabulary_tokens - 1)
        began = time.monotonic()
        self._life.send(
            Submit(request, 1, [token] * tokens, [ChoiceStart(0, 1)], Sampling(temperature=0), ignore_eos=True)
        )
        ended: AttemptEnded | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROMPT_LIMIT_S):
                ended = await self._next(AttemptEnded)
        if ended is None:
            self._life.send(Cancel(request, 1))
            ended = await self._next(AttemptEnded)
        if ended.outcome == "failed":
            raise LoadFailed(f"A prompt of {tokens} tokens failed: {ended.message or ended.code}")
        return time.monotonic() - began

    async def _next(self, kind: type[Any]) -> Any:
        """The next frame of this kind. Raises LoadFailed when the worker ends first, with the cause."""
        ended = self._life.ended
        while True:
            get = asyncio.ensure_future(self._frames.get())
            try:
                await asyncio.wait((get, ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not get.done():
                    get.cancel()
            if get.done() and not get.cancelled():
                if isinstance(get.result(), kind):
                    return get.result()
                continue
            death = await self._life.fence()
            raise LoadFailed(death.cause)

    async def _end(self) -> None:
        """Nothing of it is left, whatever happened."""
        life = self._life
        if not life.ended.done():
            life.shut_down(_STOP_S)
            await asyncio.wait((life.ended,), timeout=_STOP_S + 1.0)
        await life.fence()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GONE_S):
                await life.wait_gone()
        life.abandon()

    # ---------------------------------------------------------------- what is seen

    def _occupy(self, pid: int) -> Callable[[], None]:
        """Put the worker on an emulated device, which keeps its limit."""
        from relevo.devices.soft import SoftDevice

        device = self._device
        if not isinstance(device, SoftDevice):
            return lambda: None
        device.register(pid)
        return lambda: device.forget(pid)

    async def _watch(self, pid: int) -> None:
        seen = self._observed
        while True:
            seen.resident_bytes = _most(seen.resident_bytes, memory.peak_resident_bytes(pid))
            seen.anonymous_bytes = _most(seen.anonymous_bytes, memory.anonymous_bytes(pid))
            seen.reserved_bytes = _most(seen.reserved_bytes, memory.data_bytes(pid))
            self._look_at_device(pid)
            await asyncio.sleep(_POLL_S)

    @property
    def _seen_at_once(self) -> bool:
        return self._device is None or self._device.emulated

    def _look_at_device(self, pid: int) -> None:
        seen, device = self._observed, self._device
        if device is None or self._seen_at_once:
            return
        held = device.held_by(pid)
        if held is not None and not seen.by_process:
            seen.by_process, seen.device_bytes = True, None  # its own figure is better than a rise that others share
        used, before = self._device_used(), self._used_before
        risen = None if used is None or before is None else used - before
        seen.device_bytes = _most(seen.device_bytes, held if seen.by_process else risen)

    def _device_used(self) -> int | None:
        """Of a card, as its driver says; an emulated one counts the worker's own memory, which is seen anyway."""
        return None if self._device is None or self._seen_at_once else self._device.read().used_bytes


def _most(before: int | None, now: int | None) -> int | None:
    return before if now is None else now if before is None else max(before, now)
