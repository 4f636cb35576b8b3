"""Asking the engine what loads would allocate: in a short-lived process, bounded in time, memory and words.

One process takes many loads, because starting it (about 0.2 s) costs more than most dry runs. A file that the engine
does not bear ends the process: what was answered before stands, that file is refused, and the rest is asked anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from relevo.core.events import StartModel
from relevo.core.memory.dry_run import DryRunAnswer, DryRunFigures, DryRunRefused
from relevo.processes.limits import keep_no_core_file, limit_data_bytes
from relevo.replicas.dry_run_cache import DryRunCache
from relevo.replicas.process import worker_environment

TIMEOUT_S: Final = 30.0
DATA_LIMIT_BYTES: Final = 4 << 30
DEVICE_DATA_LIMIT_BYTES: Final = 8 << 30
"""A GPU's driver reserves memory of its own."""
_LINE_BYTES_MAX: Final = 1 << 18
_WORDS_KEPT: Final = 20
_WORDS_BYTES: Final = 4096
_TOLD_CHARACTERS: Final = 300
_GONE_WITHIN_S: Final = 5.0


class DryRuns:
    """Dry runs, one process at a time: two at once on a GPU would each see the other's driver context as taken.

    `cache`: where figures are looked up first and kept. `command` runs the worker; tests put another in its place.
    """

    def __init__(
        self,
        cache: DryRunCache | None = None,
        command: Sequence[str] | None = None,
        data_limit_bytes: int | None = None,
    ) -> None:
        self._cache = cache
        self._command = list(command or [sys.executable, "-I", "-m", "relevo.workers.llama.dry_run"])
        self._data_limit_bytes = data_limit_bytes
        self._one = asyncio.Lock()

    async def run(self, starts: Sequence[StartModel], *, timeout_s: float = TIMEOUT_S) -> list[DryRunAnswer]:
        """One answer for each start, in their order; `timeout_s` is for all of them, waiting for others included.

        Cancelled, it kills the process first. Only figures are kept in the cache, refusals never.
        """
        answers: list[DryRunAnswer | None] = await asyncio.to_thread(self._known, starts)
        groups: dict[tuple[str, str | None, bool], list[int]] = {}
        for index, start in enumerate(starts):
            if answers[index] is None:
                groups.setdefault((start.libraries, start.cpu_variant, start.device != "cpu"), []).append(index)
        asked = [index for indices in groups.values() for index in indices]
        try:
            async with asyncio.timeout(timeout_s), self._one:
                for indices in groups.values():
                    await self._ask_all(starts, indices, answers)
        except TimeoutError:
            pass
        refusal = DryRunRefused("timeout", f"The engine did not say within {timeout_s:g} s what the load would take.")
        await asyncio.to_thread(self._keep, starts, asked, answers)
        return [refusal if answer is None else answer for answer in answers]

    def _known(self, starts: Sequence[StartModel]) -> list[DryRunAnswer | None]:
        return [self._cache.find(start) if self._cache is not None else None for start in starts]

    def _keep(self, starts: Sequence[StartModel], asked: list[int], answers: list[DryRunAnswer | None]) -> None:
        for index in asked:
            answer = answers[index]
            if self._cache is not None and isinstance(answer, DryRunFigures):
                self._cache.keep(starts[index], answer)

    async def _ask_all(
        self, starts: Sequence[StartModel], indices: list[int], answers: list[DryRunAnswer | None]
    ) -> None:
        """Fill in the answers of these starts, which share libraries, with as many processes as it takes."""
        left = list(indices)
        while left:
            process = _Process(self._command, [starts[index] for index in left], self._data_limit_bytes)
            try:
                blame = await process.run()
            finally:
                for index, answer in zip(left, process.answers, strict=False):
                    answers[index] = answer
            left = left[len(process.answers) :]
            # A death is blamed on the one load it happened in; a program that cannot be talked to, on nobody's.
            blamed, left = (left[:1], left[1:]) if blame.code == "died" else (left, [])
            for index in blamed:
                answers[index] = blame


async def dry_run(
    starts: Sequence[StartModel], *, timeout_s: float = TIMEOUT_S, cache: DryRunCache | None = None
) -> list[DryRunAnswer]:
    """Ask once, as `DryRuns.run`. A service keeps one DryRuns instead, so that its dry runs wait for each other."""
    return await DryRuns(cache).run(starts, timeout_s=timeout_s)


def dry_run_now(
    starts: Sequence[StartModel], *, timeout_s: float = TIMEOUT_S, cache: DryRunCache | None = None
) -> list[DryRunAnswer]:
    """The same where no loop is running: for the command line."""
    return asyncio.run(dry_run(starts, timeout_s=timeout_s, cache=cache))


class _Process:
    """One process that is asked about `starts`. `answers` grows while it runs, in their order."""

    def __init__(self, command: list[str], starts: list[StartModel], data_limit_bytes: int | None) -> None:
        self.answers: list[DryRunAnswer] = []
        self._starts = starts
        on_device = any(start.device != "cpu" for start in starts)
        self._data_limit_bytes = data_limit_bytes or (DEVICE_DATA_LIMIT_BYTES if on_device else DATA_LIMIT_BYTES)
        limit = ["--data-limit-bytes", str(self._data_limit_bytes)]
        self._command = [*command, "--libraries", starts[0].libraries, *limit]
        self._words: deque[str] = deque(maxlen=_WORDS_KEPT)

    async def run(self) -> DryRunRefused:
        """Read all answers. Returns what to say of the first start that got none, if there is one."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=worker_environment(1),
                start_new_session=True,
                limit=_LINE_BYTES_MAX,
            )
        except OSError as e:
            return DryRunRefused("internal", f"The program for dry runs does not start: {e.strerror or e}.")
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        keep_no_core_file(process.pid)
        limit_data_bytes(process.pid, self._data_limit_bytes)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._feed(process.stdin))
                tasks.create_task(self._listen(process.stderr))
                understood = await self._read(process.stdout)
                if not understood:
                    _kill(process)
                    while await process.stdout.read(_LINE_BYTES_MAX):
                        pass
            await process.wait()
        finally:
            await _end(process)
        if not understood:
            return DryRunRefused("protocol", "What the program for dry runs printed is no answer.")
        return self._blame(process.returncode or 0)

    async def _feed(self, pipe: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # it ended without reading: its exit code says why
            pipe.write(msgspec.json.encode(self._starts))
            await pipe.drain()
        pipe.close()
        with contextlib.suppress(ConnectionError):
            await pipe.wait_closed()

    async def _read(self, pipe: asyncio.StreamReader) -> bool:
        while True:
            try:
                line = await pipe.readline()
                if not line:
                    return True
                self.answers.append(msgspec.json.decode(line, type=DryRunAnswer))
            except (ValueError, msgspec.MsgspecError):  # too long, or not JSON of an answer
                return False
            if len(self.answers) > len(self._starts):
                self.answers.clear()  # nobody can say which answer belongs to what
                return False

    async def _listen(self, pipe: asyncio.StreamReader) -> None:
        """Keep the last words, whatever their length."""
        rest = b""
        while data := await pipe.read(_WORDS_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-_WORDS_BYTES:]
            self._words += [text for line in lines if (text := line.decode("utf-8", "replace").strip())]
        if text := rest.decode("utf-8", "replace").strip():
            self._words.append(text)

    def _blame(self, code: int) -> DryRunRefused:
        start = self._starts[min(len(self.answers), len(self._starts) - 1)]
        if code < 0:
            with contextlib.suppress(ValueError):
                how = f"the engine ended ({signal.Signals(-code).name})"
                return DryRunRefused("died", self._sentence(start, how))
        return DryRunRefused("died", self._sentence(start, f"the program for it ended with exit code {code}"))

    def _sentence(self, start: StartModel, how: str) -> str:
        words = f": {self._words[-1][:_TOLD_CHARACTERS]}" if self._words else ""
        return f"In the dry run of {start.path} {how}{words}."


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:  # once reaped, the number may be somebody else's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Nothing is left of it, whatever interrupted the reading. Bounded: a driver may hang in the kernel."""
    if process.returncode is not None:
        return
    _kill(process)

    async def gone() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GONE_WITHIN_S):
                await process.communicate()

    await asyncio.shield(asyncio.ensure_future(gone()))
