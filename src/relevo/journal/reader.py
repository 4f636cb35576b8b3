"""Reading a journal that no service holds: for the command line and the audit."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import apsw

from relevo.core.errors import StateFolderError
from relevo.journal.database import open_for_reading
from relevo.journal.folder import FolderLock
from relevo.journal.reads import Reads


class JournalReader(Reads):
    """The same reads as the journal's, synchronous. Holds the folder's lock, shared with other readers."""

    def __init__(self, state: Path) -> None:
        """Raises StateFolderBusy while a service holds the folder, StateFolderError where there is no journal."""
        if not state.is_dir():
            raise StateFolderError(f"There is no state folder {state}. `relevo serve` makes one.")
        self._lock = FolderLock(state, shared=True)
        try:
            self._opened = open_for_reading(state)
        except BaseException:
            self._lock.release()
            raise
        super().__init__(self._opened)

    @property
    def connection(self) -> apsw.Connection:
        """For the audit. Writing through it is refused."""
        return self._opened

    def close(self) -> None:
        """Let the folder go. Harmless when repeated."""
        self._opened.close(True)
        self._lock.release()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
