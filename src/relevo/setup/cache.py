"""One verified cache for everything fetched, shared by all clones of a user.

An entry is a folder that appears whole or not at all: it is filled under another name, its files are listed
with their sizes and checksums in `contents.json`, and then it is renamed into place under a lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

from relevo.core.errors import StartupError

LIST_NAME = "contents.json"
LOCK_TIMEOUT_S = 3600.0
_POLL_S = 0.2


class CacheError(StartupError):
    """The cache folder cannot be used."""

    code = "cache"


def cache_folder() -> Path:
    """Where fetched files are kept: RELEVO_CACHE, else the user's cache folder of this system."""
    named = os.environ.get("RELEVO_CACHE")
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("relevo", appauthor=False))


def find_entry(key: str) -> Path | None:
    """The folder of a complete entry, or None. Checks that every listed file is there with its size."""
    folder = cache_folder() / key
    listed = _read_list(folder)
    if listed is None:
        return None
    for name, (size_bytes, _) in listed.items():
        try:
            if (folder / name).stat().st_size != size_bytes:
                return None
        except OSError:
            return None
    return folder


def damaged_files(key: str) -> list[str]:
    """Names of an entry's files whose checksum is not the one recorded when it was fetched. Reads every byte."""
    folder = cache_folder() / key
    listed = _read_list(folder) or {}
    return [name for name, (_, sha256) in listed.items() if sha256_of_file(folder / name) != sha256]


def ensure_entry(key: str, fill: Callable[[Path], None], on_wait: Callable[[], None] = lambda: None) -> Path:
    """The folder of this entry, filled by `fill(folder)` when it is not complete yet.

    Two runs at once do it once: the second calls `on_wait` and waits for the first. What an interrupted run
    left behind is thrown away. Raises CacheError, and whatever `fill` raises; then nothing is kept.
    """
    found = find_entry(key)
    if found is not None:
        return found
    folder = cache_folder() / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock"), on_wait):
            found = find_entry(key)
            return found if found is not None else _fill(folder, fill)
    except OSError as e:
        raise CacheError(
            f"The cache folder {cache_folder()} cannot be used: {e.strerror or e}. RELEVO_CACHE names another."
        ) from e


def sha256_of_file(path: Path) -> str:
    """The checksum of a file in hexadecimal; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _fill(folder: Path, fill: Callable[[Path], None]) -> Path:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # we hold the lock, so it is nobody's
    partial.mkdir()
    try:
        fill(partial)
        listed = {
            str(path.relative_to(partial)): [path.stat().st_size, sha256_of_file(path)]
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        (partial / LIST_NAME).write_text(json.dumps({"files": listed}, indent=1), encoding="utf-8")
        _sync(partial)
        shutil.rmtree(folder, ignore_errors=True)  # incomplete, or find_entry would have taken it
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _sync(folder: Path) -> None:
    """What is renamed into place must be on the disk, or a power cut leaves an entry of empty files."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())


def _read_list(folder: Path) -> dict[str, tuple[int, str]] | None:
    try:
        raw = json.loads((folder / LIST_NAME).read_text(encoding="utf-8"))
        return {str(name): (int(size), str(sha256)) for name, (size, sha256) in raw["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextlib.contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file. The system frees it with its process, so a killed run leaves none behind."""
    with path.open("a+b") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        waited = False
        while not _try_lock(file.fileno()):
            if not waited:
                on_wait()
                waited = True
            if time.monotonic() > deadline:
                raise CacheError(f"Another run has held {path} for an hour. End it, then try again.")
            time.sleep(_POLL_S)
        yield


def _try_lock(fd: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows: a rename is atomic there too; two runs at once only do the work twice
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
