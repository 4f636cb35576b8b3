"""The operator's key: who can read the state folder may see and command everything, so its owner needs no other key."""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from relevo.core.errors import StateFolderError

FILE_NAME = "operator.key"


class OperatorKey:
    """A key drawn anew at each start and left in the state folder, readable by its owner alone."""

    def __init__(self, state: Path) -> None:
        """Draw and write it. Raises StateFolderError where it cannot be written."""
        self._plain = "ro-" + secrets.token_urlsafe(32)
        path = state / FILE_NAME
        try:
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(self._plain)
        except OSError as e:
            raise StateFolderError(f"{path} cannot be written: {e.strerror or e}.") from None

    def is_this(self, plain: str) -> bool:
        """Whether this text is the key; takes the same time whatever it is."""
        return hmac.compare_digest(self._plain.encode(), plain.encode("utf-8", "surrogatepass"))


def read_operator_key(state: Path) -> str | None:
    """The key of the service on this state folder, for the commands; None where there is none or it is not ours."""
    try:
        return (state / FILE_NAME).read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None
