"""The keys that open this server: hashes on the disk, the plain key shown once."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import string
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final, TypedDict, Unpack

import msgspec
import structlog

from relevo.api.operator import OperatorKey
from relevo.core.errors import BadRequest, Conflict, NotFound, StartupError
from relevo.core.grant import HIGHEST_PRIORITY, LOWEST_PRIORITY, Grant, PolicyName

log = structlog.get_logger(__name__)

_ALPHABET = string.ascii_letters + string.digits
_KEY_LETTERS = 40
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}")


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key. Its id is the owner of every request made with it; a revoked key stays listed and opens nothing.

    Defaults are not written, so that an older program reads a file in which nobody uses what came later.
    """

    id: str
    name: str
    sha256: str
    created: float
    revoked: float | None = None
    policy: PolicyName | None = None
    policy_fixed: bool = False
    priority: Annotated[int, msgspec.Meta(ge=LOWEST_PRIORITY, le=HIGHEST_PRIORITY)] = 0

    @property
    def grant(self) -> Grant:
        """What it gives its requests."""
        return Grant(self.policy, self.policy_fixed, self.priority)


NOTHING_SPECIAL: Final = Grant()


class Changes(TypedDict, total=False):
    """What of a key's grant is to change; what is left out stays."""

    policy: PolicyName | None
    policy_fixed: bool
    priority: int


class _KeyFile(msgspec.Struct, frozen=True):
    version: int
    keys: list[Key]


class KeyRing:
    """The keys in one file, read again when the file changes.

    A ring that ever had a key demands one for good: revoking the last key, damaging the file or
    removing it while the server runs never opens the server.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` None: no keys at all. Raises StartupError where the file cannot be read or is damaged."""
        self.operator: OperatorKey | None = None
        """Set by the service that runs on this state folder."""
        self._path = path
        self._keys: dict[str, Key] = {}
        self._seen: tuple[int, int, int] | None = None
        if path is not None:
            self._seen = self._stat()
            self._keys = self._read()

    @property
    def required(self) -> bool:
        """Whether a key is needed on this server."""
        self._refresh()
        return bool(self._keys)

    def list(self) -> list[Key]:
        """All keys, oldest first, revoked ones too."""
        self._refresh()
        return sorted(self._keys.values(), key=lambda key: key.created)

    def find(self, plain: str) -> Key | None:
        """The key this text is, or None. The time taken does not depend on how much of it was right."""
        self._refresh()
        given = hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()
        found = None
        for key in self._keys.values():
            if hmac.compare_digest(key.sha256, given):
                found = key
        return found if found is not None and found.revoked is None else None

    def create(self, name: str, grant: Grant = NOTHING_SPECIAL) -> tuple[Key, str]:
        """Make a key and store its hash; the plain key is returned here and never again.

        Raises BadRequest for an unusable name or grant, Conflict where a working key has the name.
        """
        _check_grant(grant)
        if not _NAME.fullmatch(name):
            raise BadRequest(
                "A key's name is 1 to 64 letters, digits, spaces or . _ @ - and starts with a letter or digit."
            )
        self._refresh()
        if any(key.name == name and key.revoked is None for key in self._keys.values()):
            raise Conflict(f"There is a key named {name!r} already. Choose another name, or revoke that one first.")
        plain = "rk-" + "".join(secrets.choice(_ALPHABET) for _ in range(_KEY_LETTERS))
        key = Key(
            id="key_" + secrets.token_hex(8),
            name=name,
            sha256=hashlib.sha256(plain.encode()).hexdigest(),
            created=time.time(),
            **msgspec.structs.asdict(grant),
        )
        self._write({**self._keys, key.id: key})
        return key, plain

    def regrant(self, which: str, **changes: Unpack[Changes]) -> Key:
        """Change what a working key gives its requests, from the next one on. Errors as in `revoke` and `create`."""
        found = self._working(which)
        changed = msgspec.structs.replace(found, **changes)
        _check_grant(changed.grant)
        self._write({**self._keys, changed.id: changed})
        return changed

    def revoke(self, which: str) -> Key:
        """Revoke by name, id or the beginning of an id. Raises NotFound or, where several fit, Conflict."""
        revoked = msgspec.structs.replace(self._working(which), revoked=time.time())
        self._write({**self._keys, revoked.id: revoked})
        return revoked

    def _working(self, which: str) -> Key:
        self._refresh()
        working = [key for key in self._keys.values() if key.revoked is None]
        found = [key for key in working if which in (key.name, key.id)]
        if not found and len(which) >= 5:
            found = [key for key in working if key.id.startswith(which)]
        if not found:
            raise NotFound(f"No working key has the name or id {which!r}. `relevo keys list` shows them.")
        if len(found) > 1:
            raise Conflict(f"{len(found)} keys fit {which!r}. Give more of the id.")
        return found[0]

    def _stat(self) -> tuple[int, int, int] | None:
        assert self._path is not None
        try:
            at = self._path.stat()
        except OSError:
            return None
        return at.st_mtime_ns, at.st_size, at.st_ino

    def _refresh(self) -> None:
        """Read the file again if it changed. A file that went missing or bad leaves the keys as they were."""
        if self._path is None:
            return
        now = self._stat()
        if now == self._seen:
            return
        self._seen = now
        if now is None:
            log.warning("keys.file_missing", kept=len(self._keys))
            return
        try:
            self._keys = self._read() or self._keys
        except StartupError as error:
            log.warning("keys.file_unusable", problem=error.message, kept=len(self._keys))

    def _read(self) -> dict[str, Key]:
        assert self._path is not None
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as e:
            raise StartupError(f"The key file {self._path} cannot be read: {e.strerror}.") from None
        try:
            file = msgspec.json.decode(data, type=_KeyFile)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise StartupError(f"The key file {self._path} is damaged: {e}. Restore it, or make new keys.") from None
        return {key.id: key for key in file.keys}

    def _write(self, keys: dict[str, Key]) -> None:
        """Replace the file in one step, on the disk before it is believed. Mode 0600."""
        if self._path is None:
            raise StartupError("There is no state folder to keep keys in.")
        folder = self._path.parent
        data = msgspec.json.format(msgspec.json.encode(_KeyFile(version=1, keys=list(keys.values()))), indent=2)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".keys-")  # mkstemp makes it 0600
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._keys = keys
        self._seen = self._stat()


def _check_grant(grant: Grant) -> None:
    if not LOWEST_PRIORITY <= grant.priority <= HIGHEST_PRIORITY:
        raise BadRequest(
            f"The priority {grant.priority} is not valid: a whole number from {LOWEST_PRIORITY} to {HIGHEST_PRIORITY}."
        )
    if grant.policy_fixed and grant.policy is None:
        raise BadRequest("There is no policy to be fixed: name one, such as --policy cpu-only.")
