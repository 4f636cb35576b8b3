"""The journal as the service sees it: submit operations, await their durability, read records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import apsw

from relevo.core.errors import JournalUnavailable
from relevo.journal.bodies import Bodies
from relevo.journal.database import open_for_writing
from relevo.journal.folder import FolderLock, HighWater, Reserve, make_folder
from relevo.journal.operations import Operation
from relevo.journal.reader import JournalReader
from relevo.journal.reads import EVENTS_AT_ONCE, Reads, read_mark
from relevo.journal.records import (
    Condition,
    Counts,
    EventRecord,
    Gap,
    MeasurementRecord,
    RequestRecord,
    RequestSummary,
    WorkerRecord,
    WriterStats,
)
from relevo.journal.retention import Limits
from relevo.journal.statements import statements
from relevo.journal.writer import Question, Submission, Writer

T = TypeVar("T")
# `list` is a method's name in the class below
Requests = list[RequestRecord]
Events = list[EventRecord]
Workers = list[WorkerRecord]
Measurements = list[MeasurementRecord]
Gaps = list[Gap]
Ids = list[str]

CLOSE_S = 30.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Journal:
    """One open state folder. Use from any running event loop; one instance holds the folder at a time."""

    def __init__(self, lock: FolderLock, writer: Writer, bodies: Bodies, gap: Gap | None) -> None:
        """Use `Journal.open`."""
        self._lock = lock
        self._bodies = bodies
        self._writer = writer
        self._gap = gap
        self._watchers: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []
        writer.on_change = self._changed

    # --------------------------------------------------------------- opening, closing

    @classmethod
    def open(
        cls,
        state: Path,
        *,
        reserve_bytes: int,
        retention_s: float,
        payload_bytes: int,
        clock: Callable[[], float] = time.time,
        vfs: str | None = None,
    ) -> Journal:
        """Take the state folder, make or recover its journal, and start the writer.

        Raises StateFolderBusy naming the holder; StateFolderError when the folder is not writable, has no space,
        or the file is damaged, another program's, or a newer Relevo's. A journal that opens on a full disk opens
        with `accepting` False, so that accepted work can end.
        """
        make_folder(state)
        lock = FolderLock(state)
        connection = None
        try:
            reserve = Reserve(state, reserve_bytes)
            reserve_made = reserve.make()
            connection = open_for_writing(state, vfs)
            high_water = HighWater(state)
            boot = _boot()
            gap = _recover(connection, high_water, boot, clock())
            limits = Limits(retention_s, payload_bytes)
            writer = Writer(connection, state, limits, reserve, high_water, boot, clock)
            bodies = Bodies(state)
            bodies.sweep(row[0] for row in connection.execute(statements()["payload_paths"]))
            journal = cls(lock, writer, bodies, gap)
            writer.start(reserve_made=reserve_made)
        except BaseException:
            if connection is not None:
                connection.close(True)
            lock.release()
            raise
        return journal

    @staticmethod
    def open_reader(state: Path) -> JournalReader:
        """Read a journal that nobody holds, without changing it. Raises StateFolderBusy or StateFolderError."""
        return JournalReader(state)

    def announce(self, address: str) -> None:
        """Write into the lock file where this instance answers, for the commands that talk to it."""
        self._lock.announce(address)

    async def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is queued, checkpoint, and let the folder go. Harmless when repeated.

        Raises JournalUnavailable when the disk does not answer in time; the folder stays taken then.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._writer.stop((loop, done))
        try:
            await asyncio.wait_for(asyncio.shield(done), timeout_s)
        except TimeoutError:
            raise JournalUnavailable(f"The journal could not be closed within {timeout_s:g} s.") from None
        self._lock.release()

    def close_blocking(self, timeout_s: float = CLOSE_S) -> None:
        """The same without an event loop."""
        self._writer.stop()
        if not self._writer.join(timeout_s):
            raise JournalUnavailable(f"The journal could not be closed within {timeout_s:g} s.")
        self._lock.release()

    # ---------------------------------------------------------------------- condition

    @property
    def accepting(self) -> bool:
        """Whether new work can be recorded now."""
        return self._writer.refusal() is None

    @property
    def condition(self) -> Condition:
        """Working, full, broken or closed."""
        return self._writer.condition

    @property
    def trouble(self) -> str | None:
        """A plain sentence when not accepting, else None."""
        refusal = self._writer.refusal()
        return None if refusal is None else refusal.message

    @property
    def missing_after_crash(self) -> Gap | None:
        """Acknowledged commits that this opening did not find in the file, or None. `gaps` has the older ones."""
        return self._gap

    @property
    def stats(self) -> WriterStats:
        """What the writer did since it was opened."""
        return self._writer.stats

    @property
    def pending(self) -> int:
        """Submissions and reads that wait for the writer, about."""
        return self._writer.pending

    def watch(self, callback: Callable[[], None]) -> None:
        """Call this in the running loop whenever `condition` changes."""
        self._watchers.append((asyncio.get_running_loop(), callback))

    def _changed(self) -> None:
        for loop, callback in self._watchers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(callback)

    # ------------------------------------------------------------------------ writing

    def submit(self, *operations: Operation) -> asyncio.Future[None]:
        """Queue operations in order. The future resolves when the commit that holds them is synced.

        All of one call are written or none. It fails with JournalUnavailable (not written), or with StateConflict,
        KeyTaken, RequestNotFound or BadOperation (refused alone; others in the same commit are not touched).
        """
        loop = asyncio.get_running_loop()
        submission = Submission(operations, loop.create_future(), loop)
        try:
            if submission.accepts and (refusal := self._writer.refusal()) is not None:
                raise refusal
            self._writer.put(submission)
        except JournalUnavailable as e:
            submission.future.set_exception(e)
        return submission.future

    async def commit(self, *operations: Operation) -> None:
        """`submit`, awaited. Cancelling the wait does not undo the write."""
        await self.submit(*operations)

    async def store_body(self, request_id: str, data: bytes) -> str:
        """Put a large body (over bodies.LARGE_BYTES) into a synced file, before its acceptance is submitted.

        Returns the value for AcceptRequest.payload_path. Raises JournalUnavailable when it cannot be stored.
        """
        if (refusal := self._writer.refusal()) is not None:
            raise refusal
        return await asyncio.to_thread(self._bodies.write, request_id, data)

    async def load_body(self, payload_path: str) -> bytes | None:
        """A stored body; None when it is gone."""
        return await asyncio.to_thread(self._bodies.read, payload_path)

    # ------------------------------------------------------------------------ reading

    async def get(self, request_id: str) -> RequestRecord | None:
        """A request by its id, or None."""
        return await self._ask(lambda reads: reads.get(request_id))

    async def list(
        self, owner: str | None, limit: int = 50, state: str | None = None, idempotency_key: str | None = None
    ) -> list[RequestSummary]:
        """Newest first, without payloads. `owner` None: of all owners."""
        return await self._ask(lambda reads: reads.summaries(owner, limit, state, idempotency_key))

    async def find_by_key(self, owner: str, key: str) -> RequestRecord | None:
        """The request of this owner with this Idempotency-Key, or None."""
        return await self._ask(lambda reads: reads.find_by_key(owner, key))

    async def find_recent_by_digest(self, owner: str, digest: str, since: float) -> RequestRecord | None:
        """The newest request of this owner with this body, created at `since` or later, or None."""
        return await self._ask(lambda reads: reads.find_recent_by_digest(owner, digest, since))

    async def open_requests(self) -> Requests:
        """Everything that has not ended, in order of acceptance, with all that is needed to go on."""
        return await self._ask(lambda reads: reads.open_requests())

    async def events(self, request_id: str, after_seq: int = 0, limit: int = EVENTS_AT_ONCE) -> Events:
        """Events past `after_seq`, in order, at most `limit`."""
        return await self._ask(lambda reads: reads.events(request_id, after_seq, limit))

    async def workers(self) -> Workers:
        """Worker processes of this boot that were not seen to go."""
        return await self._ask(lambda reads: reads.workers())

    async def fact(self, key: str) -> bytes | None:
        """A remembered value (JSON), or None."""
        return await self._ask(lambda reads: reads.fact(key))

    async def facts(self, prefix: str = "") -> dict[str, bytes]:
        """All remembered values whose key begins so."""
        return await self._ask(lambda reads: reads.facts(prefix))

    async def measurements(
        self, key: str | None = None, *, engine: str | None = None, driver: str | None = None
    ) -> Measurements:
        """What loads taught about memory, oldest first. None: of all keys, engines, drivers."""
        return await self._ask(lambda reads: reads.measurements(key, engine=engine, driver=driver))

    async def counts(self) -> Counts:
        """Requests by state since the journal was made, and the used size of the file."""
        return await self._ask(lambda reads: reads.counts())

    async def gaps(self) -> Gaps:
        """Every loss that was ever announced."""
        return await self._ask(lambda reads: reads.gaps())

    async def expire_due(self, now: float) -> Ids:
        """Ids of resumable requests whose time is over at `now`. The caller ends them."""
        return await self._ask(lambda reads: reads.expire_due(now))

    async def _ask(self, ask: Callable[[Reads], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._writer.put(Question(ask, future, loop))
        return await future


def _recover(connection: apsw.Connection, high_water: HighWater, boot: str, now: float) -> Gap | None:
    """Compare the file with the mark beside it, announce what is missing, and never use its numbers again."""
    execute = connection.execute
    mark = high_water.read()
    journal, commits, number = read_mark(connection)
    gap: Gap | None = None
    numbers: tuple[int | None, int | None]
    if mark is not None and mark.journal != journal and mark.commits:
        numbers = (1, mark.number) if mark.number else (None, None)
        gap = Gap(now, 1, mark.commits, *numbers)
    elif mark is not None and mark.journal == journal and mark.commits > commits:
        numbers = (number + 1, mark.number) if mark.number > number else (None, None)
        gap = Gap(now, commits + 1, mark.commits, *numbers)
    execute("BEGIN IMMEDIATE")
    execute(statements()["forget_other_boots"], (boot,))
    if gap is not None:
        execute(statements()["add_gap"], (gap.at, gap.commits_from, gap.commits_to, gap.numbers_from, gap.numbers_to))
        if mark is not None and mark.journal == journal:
            execute(statements()["skip_commits"], (mark.commits,))
            execute(statements()["begin_numbers"])
            execute(statements()["skip_numbers"], (mark.number,))
    execute("COMMIT")
    high_water.write(read_mark(connection))
    return gap


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
