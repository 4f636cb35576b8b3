"""The gateway's handle on a text process: render a chat, count tokens, and never wait for it without a bound.

One call at a time: a call takes a few milliseconds, and so a process that hangs or dies names the call
that did it. It is started again at once when it dies; the call under way is tried once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from relevo.core.breaker import FaultKind
from relevo.core.errors import BadRequest, BodyTooLarge, EngineFailed, NothingCanServe, RelevoError
from relevo.core.events import FromText, Render, Rendered, StartText, TextReady, TextRefused, Tokenize
from relevo.models.payload import PayloadError, spill, whole
from relevo.processes.identity import Identity
from relevo.replicas.death import Death
from relevo.replicas.incarnation import Incarnation, LifeSettings
from relevo.replicas.liveness import LivenessLimits
from relevo.replicas.process import ProcessLimits, worker_command, worker_environment
from relevo.replicas.wire import WireError

_log = logging.getLogger("relevo.text")

Call = TypeVar("Call", Render, Tokenize)

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 5.0
_SHORTEST_WAIT_S = 1.0
"""What a call that has waited for others may still wait for a restart."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Limits of a text process. Seconds and bytes."""

    call_timeout_s: float = 20.0
    """Longest time of one call by the clock; after it the process is killed. Its own limits count processor time."""
    silence_s: float = 5.0
    """Longest time without a heartbeat."""
    start_timeout_s: float = 60.0
    """Longest time until it is ready."""
    call_wait_s: float = 10.0
    """Longest wait of a call for a process that is just starting."""
    folder: Path | None = None
    """Where texts too large for a frame lie while they are worked on. None: the system's folder for such."""
    limits: ProcessLimits = field(default_factory=lambda: ProcessLimits(oom_score_adj=300))
    """It bounds its own memory once it knows how much its model's vocabulary takes."""
    extra_environment: Mapping[str, str] = field(default_factory=dict)
    command: Callable[[int], Sequence[str]] | None = None
    """Another program than `relevo.workers.text`, given the socket's descriptor number."""


class _Died(Exception):
    """The process died under a call."""


class TextProcess:
    """Rendering and counting for one model. `run` belongs into the owner's task group."""

    def __init__(
        self,
        model: str,
        *,
        plan: Callable[[], StartText],
        settings: TextSettings | None = None,
        on_starting: Callable[[TextProcess, Identity], None] | None = None,
        on_ready: Callable[[TextProcess, TextReady], None] | None = None,
        on_lost: Callable[[TextProcess, Death], None] | None = None,
    ) -> None:
        self.model = model
        self.last_death: Death | None = None
        self.starts = 0
        self._plan = plan
        self._settings = settings or TextSettings()
        self._on_starting = on_starting
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._life: Incarnation | None = None
        self._ready: TextReady | None = None
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self._calls = 0
        self._answer: asyncio.Future[Rendered | TextRefused | None] | None = None
        self._answer_call = 0
        self._answer_until_s = 0.0
        self._folder: Path | None = None
        self._stopping = False
        self._wake = asyncio.Event()
        self._finished = asyncio.Event()
        self._finished.set()

    @property
    def ready(self) -> TextReady | None:
        """What the present process said when it was ready; None when there is none."""
        return self._ready

    @property
    def identity(self) -> Identity | None:
        """The present process, None when there is none."""
        process = self._life.process if self._life is not None else None
        return process.identity if process is not None else None

    @property
    def pid(self) -> int | None:
        """Its process id, None when there is none."""
        return self.identity.pid if self.identity is not None else None

    async def wait_ready(self, timeout_s: float | None = None) -> TextReady:
        """Wait until it can work, `call_wait_s` if not told otherwise.

        Raises NothingCanServe with the last cause when the time is over or it stopped.
        """
        try:
            async with asyncio.timeout(self._settings.call_wait_s if timeout_s is None else timeout_s):
                while self._ready is None or self._life is None or self._life.is_over:
                    if self._stopping:
                        raise NothingCanServe(f"The text process of {self.model} is stopped.")
                    self._news.clear()
                    await self._news.wait()
                return self._ready
        except TimeoutError:
            because = f" {self.last_death.cause}" if self.last_death is not None else ""
            raise NothingCanServe(f"The text process of {self.model} is not ready.{because}", retry_after_s=5) from None

    async def render(
        self, messages: list[Any], tools: list[Any] | None = None, variables: Mapping[str, Any] | None = None
    ) -> Rendered:
        """Render a chat with the model's template, and tokenize it.

        Raises BadRequest (the template refuses it or takes too long), BodyTooLarge, EngineFailed (the process
        died twice on it), NothingCanServe (it is not ready in time).
        """
        return await self._call(lambda call: Render(call, messages, tools, dict(variables or {})))

    async def tokenize(self, text: str, *, add_bos: bool = True, special: bool = False) -> Rendered:
        """Tokenize plain text. Raises as `render` does."""
        return await self._call(lambda call: Tokenize(call, text, add_bos, special))

    async def stop(self, grace_s: float = 2.0) -> None:
        """Stop the process and end `run`. Calls that wait raise NothingCanServe."""
        self._stopping = True
        self._wake.set()
        self._news.set()
        if self._life is not None:
            self._life.shut_down(grace_s)
        await self._finished.wait()

    def run(self) -> Coroutine[Any, Any, None]:
        """Keep a text process alive until `stop`. A stop that comes before the task's first step counts."""
        if not self._finished.is_set():
            raise RuntimeError(f"The text process of {self.model} runs already.")
        self._stopping = False
        self._wake.clear()
        return self._run()

    async def _run(self) -> None:
        self._finished.clear()
        parent = self._settings.folder
        if parent is not None:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="relevo-text-", dir=parent))  # mode 0700
        delay_s = _FIRST_DELAY_S
        try:
            while not self._stopping:
                was_useful = await self._live()
                delay_s = _FIRST_DELAY_S if was_useful else min(2 * delay_s, _LONGEST_DELAY_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._wake.wait()
        finally:
            self._stopping = True
            self._news.set()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            self._finished.set()

    # --- one life

    async def _live(self) -> bool:
        """One process from start to end. Returns whether it answered anything."""
        self.starts += 1
        life = Incarnation(self.starts, f"text {self.model}", self._life_settings(), self._take, lambda _: None)
        self._life = life
        answered_before = self._calls
        try:
            if not self._stopping:
                await self._start(life)
            else:
                life.kill("It was asked to end before it had started.", None)
            await asyncio.shield(life.ended)
        finally:
            was_ready = life.is_ready
            await self._bury(life)
        if life.mistake is not None:
            raise life.mistake
        return was_ready and self._calls > answered_before

    async def _start(self, life: Incarnation) -> None:
        try:
            plan = self._plan()
            await life.start(self._settings.limits)
        except RelevoError as e:
            life.kill(e.message, FaultKind.UNCLASSIFIED_DEATH)
            return
        except OSError as e:
            life.kill(f"The text process of {self.model} could not be started: {e}.", FaultKind.UNCLASSIFIED_DEATH)
            return
        assert life.process is not None
        if self._on_starting is not None:
            self._on_starting(self, life.process.identity)
        with contextlib.suppress(WireError):  # it ended already, and its life says why
            life.send(msgspec.structs.replace(plan, folder=str(self._folder)))

    async def _bury(self, life: Incarnation) -> None:
        self._ready = None
        self._life = None
        try:
            death = await life.fence()
            if not self._stopping:
                self.last_death = death
                _log.warning("The text process of %s ended: %s", self.model, death.cause)
            self._lose_answer()
            if self._on_lost is not None:
                self._on_lost(self, death)
            async with asyncio.timeout(5.0):
                await life.wait_gone()
        except TimeoutError:
            _log.error("A text process of %s would not go after SIGKILL.", self.model)
        finally:
            self._lose_answer()
            life.abandon()

    def _life_settings(self) -> LifeSettings:
        silence_s = self._settings.silence_s
        return LifeSettings(
            command=self._settings.command or (lambda fd: worker_command("text", fd)),
            environment=worker_environment(1, self._settings.extra_environment),
            incoming=FromText,
            liveness=LivenessLimits(suspect_s=silence_s, fence_s=silence_s, step_deadline_s=math.inf),
            load_timeout_s=self._settings.start_timeout_s,
        )

    def _take(self, frame: Any) -> None:
        if isinstance(frame, TextReady):
            if self._life is not None:
                self._life.ready()
                self._ready = frame
                self._news.set()
                if self._on_ready is not None:
                    self._on_ready(self, frame)
        elif frame.call == self._answer_call and self._answer is not None and not self._answer.done():
            self._answer.set_result(frame)

    def _lose_answer(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    # --- one call

    async def _call(self, make: Callable[[int], Call]) -> Rendered:
        until_s = asyncio.get_running_loop().time() + self._settings.call_wait_s
        await self.wait_ready()  # all at once, not one after the other
        async with self._turn:
            await self._await_orphan()
            for _ in range(2):
                await self.wait_ready(max(_SHORTEST_WAIT_S, until_s - asyncio.get_running_loop().time()))
                try:
                    return await self._try_call(make)
                except (_Died, WireError):
                    continue
            because = f" {self.last_death.cause}" if self.last_death is not None else ""
            raise EngineFailed(f"The text process of {self.model} failed twice on this request.{because}")

    async def _try_call(self, make: Callable[[int], Call]) -> Rendered:
        self._calls += 1
        call = self._calls
        frame = await self._pack(make(call))
        life, loop = self._life, asyncio.get_running_loop()
        answer: asyncio.Future[Rendered | TextRefused | None] = loop.create_future()
        if frame.payload_path is not None:
            path = Path(frame.payload_path)
            answer.add_done_callback(lambda _: path.unlink(missing_ok=True))
        timeout_s = self._settings.call_timeout_s
        self._answer, self._answer_call, self._answer_until_s = answer, call, loop.time() + timeout_s
        try:
            if life is None:
                raise _Died
            life.send(frame)
            async with asyncio.timeout(timeout_s):
                said = await asyncio.shield(answer)
        except TimeoutError:
            answer.cancel()
            assert life is not None
            life.kill(f"The text process took longer than {timeout_s:g} s for one call.", FaultKind.STALL)
            raise self._too_slow(frame) from None
        except (WireError, _Died):
            answer.cancel()
            raise
        except asyncio.CancelledError:
            answer.add_done_callback(self._discard)
            raise
        if said is None:
            if self.last_death is not None and self.last_death.signal == signal.SIGXCPU:
                raise self._too_slow(frame)  # it ended itself, in code that could not be interrupted
            raise _Died
        if isinstance(said, TextRefused):
            raise self._refusal(said, frame)
        return await self._unpack(said)

    async def _await_orphan(self) -> None:
        """A caller that went away left its call running: it may use up its own time, not the next one's."""
        answer = self._answer
        if answer is None or answer.done():
            return
        left_s = self._answer_until_s - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait({answer}, timeout=max(0.0, left_s))
        if not done:
            answer.cancel()
            if self._life is not None:
                self._life.kill("The text process took too long for a call whose caller went away.", FaultKind.STALL)

    def _discard(self, answer: asyncio.Future[Rendered | TextRefused | None]) -> None:
        """Delete the file of an answer that nobody will read."""
        said = None if answer.cancelled() else answer.result()
        if isinstance(said, Rendered) and said.payload_path is not None and self._is_ours(said.payload_path):
            Path(said.payload_path).unlink(missing_ok=True)

    def _is_ours(self, path: str) -> bool:
        return self._folder is not None and Path(path).parent == self._folder

    async def _pack(self, frame: Call) -> Call:
        try:
            return spill(frame, None)  # the usual case: it fits, and touches no file
        except PayloadError:
            pass
        try:
            return await asyncio.to_thread(spill, frame, self._folder)
        except PayloadError as e:
            raise BodyTooLarge(str(e)) from None

    async def _unpack(self, said: Rendered) -> Rendered:
        if said.payload_path is None:
            return said
        if not self._is_ours(said.payload_path):
            raise EngineFailed(f"The text process of {self.model} named a file outside its folder.")
        try:
            return await asyncio.to_thread(lambda: whole(said, delete=True))
        except PayloadError as e:
            raise EngineFailed(str(e)) from None

    def _too_slow(self, frame: Render | Tokenize) -> BadRequest:
        what = "chat template" if isinstance(frame, Render) else "tokenizer"
        return BadRequest(f"The {what} of {self.model} took too long on this request and was stopped.")

    def _refusal(self, said: TextRefused, frame: Render | Tokenize) -> BadRequest | BodyTooLarge:
        match said.code:
            case "too_large":
                return BodyTooLarge(said.message)
            case "timeout":
                what = "chat template" if isinstance(frame, Render) else "tokenizer"
                return BadRequest(f"The {what} of {self.model} took too long on this request. {said.message}")
            case _:
                return BadRequest(said.message)
