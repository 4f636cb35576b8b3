"""Opening the file: the settings durability rests on, migrations, and the check that it is ours and whole."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import apsw

from relevo.core.errors import StateFolderBusy, StateFolderError
from relevo.journal.statements import migrations

FILE = "journal.db"
APPLICATION_ID = 0x52454C56  # "RELV": another program's database is refused
# 3.7.0 to 3.51.2 can lose commits when a checkpoint races a writer; 3.52.0 was withdrawn.
OLDEST_SQLITE = (3, 51, 3)
WITHDRAWN_SQLITE = (3, 52, 0)
CHECKED_BYTES = 256 * 2**20  # a larger file is checked by `relevo audit`, not at each start
WAL_KEPT_BYTES = 8 * 2**20

# Order matters: exclusive locking before the first access to the WAL keeps its index in memory, and
# auto_vacuum must be set before the first table.
WRITER_PRAGMAS = (
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA auto_vacuum = INCREMENTAL",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA mmap_size = 0",
    "PRAGMA foreign_keys = ON",
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA secure_delete = ON",  # blanked means gone: freed space is overwritten with zeros
    # Checkpoints are our own: SQLite hides the errors of automatic ones, and a sync that failed
    # there and succeeds when repeated has lost pages.
    "PRAGMA wal_autocheckpoint = 0",
    f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}",
)


def check_sqlite(version: str | None = None) -> None:
    """Raises StateFolderError for an SQLite with the WAL-reset fault."""
    version = version or apsw.sqlite_lib_version()
    number = tuple(int(part) for part in version.split(".")[:3])
    if number < OLDEST_SQLITE or number == WITHDRAWN_SQLITE:
        raise StateFolderError(
            f"SQLite {version} can lose committed records; 3.51.3 or newer is needed. Install apsw 3.51.3 or newer."
        )


def open_for_writing(state: Path, vfs: str | None = None) -> apsw.Connection:
    """The one connection, exclusive, migrated and checked.

    Raises StateFolderError: not writable, no space, damaged, another program's file, a newer Relevo's file.
    """
    check_sqlite()
    path = state / FILE
    try:
        _create_private(path)
        connection = apsw.Connection(str(path), vfs=vfs)
    except (OSError, apsw.Error) as e:
        raise StateFolderError(f"The journal {path} cannot be opened for writing: {e}.") from e
    try:
        _prepare(connection, path)
    except BaseException:
        # nothing of a file that could not be opened is moved about
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.close()
        raise
    return connection


def open_for_reading(state: Path) -> apsw.Connection:
    """A connection that changes nothing. The caller holds the folder's lock. Raises StateFolderError."""
    check_sqlite()
    path = state / FILE
    if not path.is_file():
        raise StateFolderError(f"There is no journal in {state}. `relevo serve` makes one.")
    try:
        # read-write, because a journal left by a crash is recovered in memory and needs its index file
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.execute("PRAGMA trusted_schema = OFF")
        _check_ours(connection, path)
        if _version(connection) != len(migrations()):
            raise StateFolderError(f"{path} is of another version of Relevo. Start `relevo serve` once to bring it up.")
        connection.execute("PRAGMA query_only = ON")
    except apsw.Error as e:
        raise _sentence(path, e) from e
    return connection


def migrate(connection: apsw.Connection, upto: int | None = None) -> None:
    """Bring the schema up, one migration a transaction."""
    for version, script in migrations():
        if version <= _version(connection) or (upto is not None and version > upto):
            continue
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute(script)
            connection.execute(f"PRAGMA user_version = {version}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _prepare(connection: apsw.Connection, path: Path) -> None:
    try:
        for pragma in WRITER_PRAGMAS:
            connection.execute(pragma).fetchall()
        _check_ours(connection, path)
        if _version(connection) == 0:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        migrate(connection)
        connection.execute(
            "INSERT INTO identity SELECT 1, ?, unixepoch('subsec'), 0 WHERE NOT EXISTS (SELECT 1 FROM identity)",
            (secrets.token_hex(16),),
        )
        if connection.pragma("journal_mode") != "wal":
            raise StateFolderError(f"{path} cannot use a write-ahead log on this file system. Choose a local disk.")
        if path.stat().st_size <= CHECKED_BYTES:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != ("ok",):
                raise _damaged(path, str(found[0] if found else "no answer"))
        # What a crash left in the log is safer in the file: one flipped bit in a log drops all that follows it.
        with contextlib.suppress(apsw.FullError):
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.Error as e:
        raise _sentence(path, e) from e


def _check_ours(connection: apsw.Connection, path: Path) -> None:
    known = len(migrations())
    version = _version(connection)
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if tables != (0,) and connection.pragma("application_id") != APPLICATION_ID:
        raise StateFolderError(f"{path} is a database of another program. Choose another state folder with --state.")
    if version > known:
        raise StateFolderError(
            f"{path} was written by a newer Relevo (schema {version}, this one knows {known}). "
            "Install that version, or choose another state folder."
        )


def _version(connection: apsw.Connection) -> int:
    value = connection.pragma("user_version")
    assert isinstance(value, int)
    return value


def _create_private(path: Path) -> None:
    """SQLite gives its side files the mode of the main file, so that is made first, for its owner only."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(fd).st_mode & 0o077:
            os.fchmod(fd, 0o600)
    finally:
        os.close(fd)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _damaged(path: Path, what: str) -> StateFolderError:
    return StateFolderError(
        f"The journal {path} is damaged ({what}). Keep it for repair; start with another state folder or a backup."
    )


def _sentence(path: Path, error: apsw.Error) -> StateFolderError:
    if isinstance(error, apsw.FullError):
        return StateFolderError(f"The disk of {path.parent} is full. Free some space and start again.")
    if isinstance(error, (apsw.BusyError, apsw.LockedError)):
        return StateFolderBusy(f"Another program has the journal {path} open. Close it and start again.")
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError)):
        return _damaged(path, str(error))
    return StateFolderError(f"The journal {path} cannot be used: {error}.")
