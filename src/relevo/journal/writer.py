"""The one thread that owns the connection: group commit, and what it does when the disk fails.

It takes all that is queued, writes it in one transaction, and wakes everybody when the commit is synced.
Each submission has its own savepoint: a refused one is undone alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import msgspec

from relevo.core.errors import JournalUnavailable, RelevoError
from relevo.journal.apply import Applier
from relevo.journal.folder import HighWater, Reserve
from relevo.journal.operations import (
    AcceptRequest,
    AddEvent,
    AddMeasurement,
    BlankPayload,
    EndRequest,
    Operation,
    SaveCheckpoint,
)
from relevo.journal.reads import Reads, read_mark
from relevo.journal.records import Condition, WriterStats
from relevo.journal.retention import Limits, Retention, remove
from relevo.journal.statements import statements

COMMIT_SUBMISSIONS = 1024  # at most in one commit
COMMIT_BYTES = 16 * 2**20  # of payload, about; one more submission may go over it
PENDING_SUBMISSIONS = 65536  # beyond this nothing is accepted: the disk does not keep up
WAL_PAGES = 500  # checkpoint at this size, or after a pause; 1000 doubled the 99th percentile of a commit
PAUSE_S = 2.0
RETRY_S = 0.5  # of held writes while the disk is full
RECHECK_S = 2.0  # whether there is space again
RETENTION_S = 30.0  # between looks for something to forget
SLICE_PAUSE_S = 0.05

_FULL = "The disk is full: nothing new is accepted; accepted work can end. Free some space."


@dataclass(slots=True, eq=False)
class Submission:
    """Operations that are committed or refused together."""

    operations: tuple[Operation, ...]
    future: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    error: BaseException | None = None

    @property
    def accepts(self) -> bool:
        """Whether it brings new work."""
        return any(isinstance(o, AcceptRequest) for o in self.operations)

    @property
    def size_bytes(self) -> int:
        """Its payload, about."""
        try:
            return sum(_size_bytes(o) for o in self.operations)
        except TypeError:  # a payload of a wrong type, which is refused when it is written
            return 0


@dataclass(slots=True, eq=False)
class Question:
    """A read, run between commits."""

    ask: Callable[[Reads], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


_Answer = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Any, BaseException | None]


class Writer:
    """Owns the connection from `start` on. Public methods may be called from any thread."""

    def __init__(
        self,
        connection: apsw.Connection,
        state: Path,
        limits: Limits,
        reserve: Reserve,
        high_water: HighWater,
        boot: str,
        clock: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._reserve = reserve
        self._high_water = high_water
        self._applier = Applier(connection, boot, clock)
        self._reads = Reads(connection)
        self._retention = Retention(connection, self._applier, limits, state)
        self._state = state

        self._queue: queue.SimpleQueue[Submission | Question | None] = queue.SimpleQueue()
        self._guard = threading.Lock()  # of the three flags and what they promise about the queue
        self._stopping = False
        self._finished = False  # takes nothing more
        self._closed = False
        self._done_waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

        self._held: list[Submission] = []
        self._files: list[Path] = []
        self._wal_pages = 0
        self._next_retention = 0.0
        self._next_recheck = 0.0
        self._last_write = 0.0
        self._stats = WriterStats()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

        self.condition = Condition.WORKING
        self.trouble: str | None = None
        self.on_change: Callable[[], None] = lambda: None
        connection.set_wal_hook(self._wal_grew)

    # ------------------------------------------------------------------ any thread

    @property
    def stats(self) -> WriterStats:
        """What was done so far."""
        return self._stats

    @property
    def pending(self) -> int:
        """Items waiting, about."""
        return self._queue.qsize()

    def start(self, *, reserve_made: bool) -> None:
        """Begin. Without a reserve the journal starts full: accepted work can end, nothing new is taken."""
        if not reserve_made:
            self.condition, self.trouble = Condition.FULL, _FULL
        self._thread.start()

    def refusal(self) -> JournalUnavailable | None:
        """Why nothing can be accepted now, or None."""
        if self.condition is not Condition.WORKING:
            return JournalUnavailable(self.trouble)
        if self._queue.qsize() > PENDING_SUBMISSIONS:
            return JournalUnavailable("The disk does not keep up with the journal, so nothing more is accepted now.")
        return None

    def put(self, item: Submission | Question) -> None:
        """Queue an item. Raises JournalUnavailable when it could never be answered."""
        with self._guard:
            if self._stopping or self._finished:
                raise JournalUnavailable(self.trouble or "The journal is closed.")
            if isinstance(item, Submission) and self.condition is Condition.BROKEN:
                raise JournalUnavailable(self.trouble)
            self._queue.put(item)

    def stop(self, done: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None) -> None:
        """Finish what is queued, checkpoint, close the connection; then `done` is resolved."""
        with self._guard:
            if done is not None and not self._closed:
                self._done_waiters.append(done)
            elif done is not None:
                _deliver([(done[0], done[1], None, None)])
            if not self._stopping:
                self._stopping = True
                self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end from a thread that is not the loop's. False when it did not come in time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --------------------------------------------------------------- the writer thread

    def _run(self) -> None:
        left: list[Submission | Question] = []
        try:
            self._last_write = time.monotonic()
            while True:
                writes, questions, stop = self._take()
                left = [*self._held, *writes, *questions]
                self._write([*self._held, *writes])
                self._answer(questions)
                left = []
                if stop:
                    break
                self._chores()
        except BaseException as e:  # a fault of ours must stop acceptance, not be swallowed with the thread
            self._break(f"The journal's writer died ({type(e).__name__}: {e}). Restart Relevo.")
            self._fail(left)
        finally:
            self._finish()

    def _take(self) -> tuple[list[Submission], list[Question], bool]:
        """What is queued, waiting for the first item until something else is due."""
        writes: list[Submission] = []
        questions: list[Question] = []
        size_bytes = 0
        try:
            item = self._queue.get(timeout=self._patience())
            while True:
                if item is None:
                    return writes, questions, True
                if isinstance(item, Submission):
                    writes.append(item)
                    size_bytes += item.size_bytes
                else:
                    questions.append(item)
                if len(writes) >= COMMIT_SUBMISSIONS or size_bytes >= COMMIT_BYTES:
                    break
                item = self._queue.get_nowait()
        except queue.Empty:
            pass
        return writes, questions, False

    def _patience(self) -> float:
        now = time.monotonic()
        if self._held:
            return RETRY_S
        moments = [self._next_retention]
        if self.condition is Condition.FULL:
            moments.append(self._next_recheck)
        if self._wal_pages:
            moments.append(self._last_write + PAUSE_S)
        return max(0.001, min(moments) - now)

    def _write(self, batch: list[Submission]) -> None:
        """Commit a batch and wake its submitters; hold or fail it when the disk does not take it."""
        self._held = []
        while batch:
            if self.condition is Condition.BROKEN:
                self._fail(batch)
                return
            if self.condition is not Condition.WORKING:
                self._fail([s for s in batch if s.accepts])
                batch = [s for s in batch if not s.accepts]
            try:
                self._transaction(batch)
                self._settle(batch)
                return
            except apsw.FullError:
                self._rollback()
                if not self._fill():
                    self._held = batch
                    return
            except apsw.Error as e:
                self._rollback()
                self._break(f"The journal cannot be written ({e}). Nothing is accepted until Relevo is restarted.")

    def _transaction(self, batch: list[Submission], *, even_if_empty: bool = False) -> None:
        execute = self._connection.execute
        started = time.monotonic()
        self._files = []
        execute("BEGIN IMMEDIATE")
        written = 0
        for submission in batch:
            submission.error = None
            execute("SAVEPOINT submission")
            try:
                for operation in submission.operations:
                    if isinstance(operation, BlankPayload):
                        self._note_files(operation.id)
                    self._applier.apply(operation)
                written += 1
            except RelevoError as e:
                execute("ROLLBACK TO submission")
                submission.error = e
            execute("RELEASE submission")
        if not written and not even_if_empty:
            execute("ROLLBACK")
            return
        self._commit(started, written, len(batch) - written)

    def _commit(self, started: float, written: int, refused: int) -> None:
        execute = self._connection.execute
        execute(statements()["bump_commits"]).fetchall()
        mark = read_mark(self._connection)
        execute("COMMIT")
        self._high_water.write(mark)
        self._last_write = time.monotonic()
        took_s = self._last_write - started
        s = self._stats
        self._stats = msgspec.structs.replace(
            s,
            commits=s.commits + 1,
            submissions=s.submissions + written,
            refused=s.refused + refused,
            largest_commit=max(s.largest_commit, written),
            commit_s=s.commit_s + took_s,
            last_commit_s=took_s,
        )

    def _settle(self, batch: list[Submission]) -> None:
        if self._files:  # who is told that a payload was blanked may rely on its file being gone
            remove(self._files)
            self._files = []
        _deliver([(s.loop, s.future, None, s.error) for s in batch])
        if self._wal_pages >= WAL_PAGES:
            self._checkpoint()

    def _note_files(self, request_id: str) -> None:
        row = self._connection.execute(statements()["find_request"], (request_id,)).fetchone()
        if row is not None and row[1] in ("completed", "cancelled", "failed"):
            self._files += self._retention.files_of(row[0])

    def _answer(self, questions: list[Question]) -> None:
        answers: list[_Answer] = []
        for question in questions:
            try:
                answers.append((question.loop, question.future, question.ask(self._reads), None))
            except apsw.Error as e:
                answers.append((question.loop, question.future, None, _unreadable(e)))
            except Exception as e:  # a bad question is its asker's fault alone
                answers.append((question.loop, question.future, None, e))
        _deliver(answers)

    def _chores(self) -> None:
        now = time.monotonic()
        try:
            if self.condition is Condition.FULL and now >= self._next_recheck:
                self._next_recheck = now + RECHECK_S
                self._recheck()
            if self.condition is Condition.BROKEN:
                self._next_retention = now + RETENTION_S
                return
            if self._wal_pages and now >= self._last_write + PAUSE_S and not self._held:
                self._checkpoint()
            if now >= self._next_retention:
                self._next_retention = now + (SLICE_PAUSE_S if self._forget() else RETENTION_S)
        except apsw.FullError:
            self._rollback()
            self._fill()
            self._next_retention = now + RETENTION_S
        except apsw.Error as e:
            self._rollback()
            self._break(f"The journal cannot be written ({e}). Nothing is accepted until Relevo is restarted.")

    def _forget(self) -> bool:
        """One slice of retention. False when there is nothing more to forget."""
        now = self._clock()
        if not self._retention.due(now):
            return self._retention.shrink()
        started = time.monotonic()
        self._connection.execute("BEGIN IMMEDIATE")
        files = self._retention.slice(now)
        self._commit(started, 0, 0)
        remove(files)
        return True

    def _checkpoint(self) -> None:
        """Move the log into the file. One connection and no readers: it is always complete."""
        try:
            self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            self._wal_pages = 0
            self._stats = msgspec.structs.replace(self._stats, checkpoints=self._stats.checkpoints + 1)
        except apsw.FullError:
            self._last_write = time.monotonic()  # tried again after a pause
            self._fill()
        except apsw.Error as e:
            # After a failed sync the pages may be gone while a second sync succeeds: the log must stay as it is.
            self._break(f"The journal cannot be synced ({e}). Nothing is accepted until Relevo is restarted.")

    def _recheck(self) -> None:
        """Whether there is space again: the reserve can be made, and a real commit goes through."""
        if self._held or not self._reserve.make():
            return
        try:
            self._transaction([], even_if_empty=True)
        except apsw.FullError:
            self._rollback()
            self._reserve.give_up()
            return
        self._become(Condition.WORKING, None)

    def _fill(self) -> bool:
        """The disk is full: give up the reserve and stop acceptance. False when that was done before."""
        if self.condition is not Condition.WORKING:
            return False
        self._reserve.give_up()
        self._next_recheck = time.monotonic() + RECHECK_S
        self._become(Condition.FULL, _FULL)
        return True

    def _break(self, trouble: str) -> None:
        if self.condition is not Condition.BROKEN:
            self._become(Condition.BROKEN, trouble)

    def _become(self, condition: Condition, trouble: str | None) -> None:
        with self._guard:
            self.condition, self.trouble = condition, trouble
        self.on_change()

    def _rollback(self) -> None:
        with contextlib.suppress(apsw.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _fail(self, items: Iterable[Submission | Question]) -> None:
        why = self.trouble or "The journal is closed."
        _deliver([(item.loop, item.future, None, JournalUnavailable(why)) for item in items])

    def _finish(self) -> None:
        with self._guard:
            self._stopping = self._finished = True
        left: list[Submission | Question] = [*self._held]
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    left.append(item)
        self._fail(left)
        self._rollback()
        with contextlib.suppress(apsw.Error):
            # closing would checkpoint once more, and a sync that failed must not be repeated
            self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            if self.condition is not Condition.BROKEN:
                self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        with contextlib.suppress(apsw.Error):
            self._connection.close(True)
        self._high_water.close()
        if self.condition is not Condition.BROKEN:
            self.condition, self.trouble = Condition.CLOSED, "The journal is closed."
        with self._guard:
            self._closed = True
            waiters, self._done_waiters = self._done_waiters, []
        _deliver([(loop, future, None, None) for loop, future in waiters])

    def _wal_grew(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK


def _size_bytes(operation: Operation) -> int:
    match operation:
        case AcceptRequest():
            return len(operation.ask) + 4 * len(operation.prompt_tokens)
        case SaveCheckpoint():
            return len(operation.text) + 4 * len(operation.tokens)
        case EndRequest():
            return len(operation.result or b"")
        case AddEvent():
            return len(operation.payload)
        case AddMeasurement():
            return len(operation.value)
        case _:
            return 0


def _unreadable(error: apsw.Error) -> JournalUnavailable:
    return JournalUnavailable(f"The journal cannot be read ({error}).")


def _deliver(answers: list[_Answer]) -> None:
    """Resolve futures in their own loops, one wake-up for each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Answer]] = {}
    for answer in answers:
        by_loop.setdefault(answer[0], []).append(answer)
    for loop, mine in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
            loop.call_soon_threadsafe(_resolve, mine)


def _resolve(answers: list[_Answer]) -> None:
    for _, future, value, error in answers:
        if future.done():
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
