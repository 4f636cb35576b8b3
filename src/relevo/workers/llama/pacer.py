"""How many prompt rows a step may hold while others decode, so that their streams never pause for long."""

from __future__ import annotations

TARGET_STEP_MS = 170.0
_ROWS_MIN = 16  # below it a crowded machine would pay twice for the prompt, and the pauses would hardly shrink
_ROWS_STEP = 8  # kernels work on groups of rows; other counts leave part of a group empty
_FIRST_ROW_MS = 10.0


class Pacer:
    """Learns what a row costs here and now. Every time is passed in.

    A step is taken to last `decode + rows * row`: `decode` from steps without prompt rows, `row` from all others.
    Both follow a rise faster than a fall: a pause too long is felt, a chunk too small only costs some speed.
    """

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._decode_ms = 0.0
        self._row_ms = _FIRST_ROW_MS

    def rows(self) -> int:
        """Prompt rows for the next step while somebody decodes."""
        room = (TARGET_STEP_MS - self._decode_ms) / self._row_ms
        rows = max(_ROWS_MIN, int(room) // _ROWS_STEP * _ROWS_STEP)
        return min(rows, self._rows_max)

    def observe(self, decode_rows: int, prompt_rows: int, took_ms: float) -> None:
        """A step of so many rows took so long."""
        if not prompt_rows:
            self._decode_ms = _follow(self._decode_ms, took_ms)
            return
        spent_ms = took_ms - (self._decode_ms if decode_rows else 0.0)
        self._row_ms = max(0.001, _follow(self._row_ms, max(spent_ms, took_ms / 4) / prompt_rows))


def _follow(known: float, seen: float) -> float:
    return known + (seen - known) * (0.5 if seen > known else 0.25)
