"""Figures of dry runs, kept on the disk: one small JSON file each, good until anything that decides them changes.

A folder of files rather than a table, because the command line plans without the service's database. A damaged or
foreign file is as good as none and is written anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from relevo.core.errors import ModelFileError
from relevo.core.events import StartModel
from relevo.core.memory.dry_run import DryRunFigures
from relevo.models.gguf import read_header

ENTRIES_MAX: Final = 512
_FORM: Final = 1
_ENTRY_BYTES_MAX: Final = 1 << 18
_SUFFIX: Final = ".json"
_LIBRARY_FILE: Final = re.compile(r".*\.(so[.\d]*|dylib|dll)")
_WITHOUT_WEIGHT: Final = frozenset(
    {"model", "route", "path", "libraries", "threads", "prefill_chunk_tokens", "use_mmap"}
)
"""Fields of StartModel that change no figure, or are in the key in another form. New fields count."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What computes the figures, beside the model's file: of another build or driver they are not believed."""

    engine: str
    """The build, as the engine calls itself, and its commit where it is known."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """By the engine's device name ("CUDA0", "cpu"): description and driver version, in whatever words."""


class DryRunCache:
    """Keeps figures in `folder`, which is made when it is needed. Everything here blocks on the disk."""

    def __init__(self, folder: Path, identity: EngineIdentity, entries_max: int = ENTRIES_MAX) -> None:
        self._folder = folder
        self._identity = identity
        self._entries_max = entries_max

    def find(self, start: StartModel) -> DryRunFigures | None:
        """The figures of this load, if they are known and nothing has changed."""
        key = self._key(start)
        if key is None:
            return None
        path = self._path(key)
        try:
            if path.stat().st_size > _ENTRY_BYTES_MAX:
                return None
            entry = msgspec.json.decode(path.read_bytes(), type=_Entry)
        except (OSError, msgspec.MsgspecError):
            return None
        if entry.key != key:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # what is asked for stays
        return entry.figures

    def keep(self, start: StartModel, figures: DryRunFigures) -> None:
        """Remember them. A disk that cannot be written costs only the next dry run."""
        key = self._key(start)
        if key is None:
            return
        path = self._path(key)
        new = path.with_name(f".{path.stem[:16]}-{secrets.token_hex(4)}.new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            new.write_bytes(msgspec.json.encode(_Entry(key, figures)))
            new.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()
            return
        self._forget_oldest()

    def _key(self, start: StartModel) -> dict[str, Any] | None:
        try:
            files = [_file_facts(Path(part.path)) for part in read_header(start.path).parts]
            libraries = _library_facts(Path(start.libraries))
        except (OSError, ModelFileError):
            return None
        key = {
            "form": _FORM,
            "files": files,
            "engine": self._identity.engine,
            "libraries": libraries,
            "device": self._identity.devices.get(start.device, ""),
            # Written out with their defaults: of an omitted one nobody could say which default it was.
            "options": {name: getattr(start, name) for name in start.__struct_fields__ if name not in _WITHOUT_WEIGHT},
        }
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(key))
        return plain

    def _path(self, key: dict[str, Any]) -> Path:
        digest = hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()
        return self._folder / (digest + _SUFFIX)

    def _forget_oldest(self) -> None:
        with contextlib.suppress(OSError):
            kept = []
            for path in self._folder.iterdir():
                with contextlib.suppress(OSError):  # another process may be forgetting too
                    kept.append((path.stat().st_mtime_ns, path))
            kept.sort()
            for _, path in kept[: max(0, len(kept) - self._entries_max)]:
                path.unlink(missing_ok=True)


class _Entry(msgspec.Struct, frozen=True):
    key: dict[str, Any]
    figures: DryRunFigures


def _file_facts(path: Path) -> list[str | int]:
    facts = path.stat()
    return [str(path), facts.st_size, facts.st_mtime_ns, facts.st_ino]


def _library_facts(folder: Path) -> list[list[str | int]]:
    found: list[list[str | int]] = []
    for path in sorted(folder.iterdir()):
        if _LIBRARY_FILE.fullmatch(path.name):
            facts = path.stat()
            found.append([path.name, facts.st_size, facts.st_mtime_ns])
    return found
