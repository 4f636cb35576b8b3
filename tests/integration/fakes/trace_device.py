"""A device that says again what was recorded, when its clock gets there."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relevo.core.leases.reading import Reading
from relevo.devices.device import DeviceKind
from relevo.devices.events import DeviceEvent

TRACES = Path(__file__).parent.parent / "traces"


@dataclass(frozen=True, slots=True)
class Truth:
    """What the kernel counted at the moment of a reading."""

    ours_bytes: int
    foreign_bytes: int


class Trace:
    """One recorded file: its header, and its lines in the order of their time."""

    def __init__(self, name: str) -> None:
        header, *lines = (json.loads(line) for line in (TRACES / f"{name}.jsonl").read_text().splitlines())
        self.name: str = header["trace"]
        self.total_bytes: int = header["total_bytes"]
        self.lines: list[dict[str, Any]] = lines
        assert [line["at"] for line in lines] == sorted(line["at"] for line in lines)


class TraceDevice:
    """Implements Device. It says what the newest line before `clock` says, however late it is asked."""

    kind = DeviceKind.EMULATED
    emulated = True
    engine_device = "cpu"
    lag_s = 1.5
    stale_after_s = 5.0

    def __init__(self, name: str, trace: Trace, clock: Callable[[], float]) -> None:
        self.name = name
        self.trace = trace
        self._clock = clock
        self._readings = [line for line in trace.lines if "do" not in line]
        self._times = [line["at"] for line in self._readings]

    @property
    def description(self) -> str:
        return f"the recording {self.trace.name}"

    @property
    def tells(self) -> str:
        return "It tells what was recorded, and nothing else."

    def read(self) -> Reading:
        line = self._line()
        return Reading(
            line["total_bytes"],
            line["free_bytes"],
            read_at=line.get("read_at", line["at"]),
            reason=line.get("reason"),
        )

    def truth(self) -> Truth:
        """What was true at the moment of the reading."""
        line = self._line()
        return Truth(line["ours_bytes"], line["foreign_bytes"])

    def stop(self) -> None:
        pass

    def held_by(self, pid: int) -> int | None:
        return None

    def events(self) -> tuple[DeviceEvent, ...]:
        return ()

    def _line(self) -> dict[str, Any]:
        return self._readings[bisect.bisect_right(self._times, self._clock()) - 1]
