"""Why a worker died: from the evidence it left (return code, last lines, its own words) to one sentence and a kind.

The kind is what a breaker trips on, so a guess is not allowed to be a device's fault: what the
evidence does not name is `unclassified_death`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relevo.core.breaker import FaultKind
from relevo.core.events import StartFailed

_LINES_SEARCHED = 60

LOG_TABLE: tuple[tuple[FaultKind, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (
            FaultKind.ALLOCATION,
            r"out of memory|std::bad_alloc|\bMemoryError\b|cannot allocate memory|OutOf(Device|Host|Pool)Memory"
            r"|(failed|unable) to allocate|alloc\w* (of \S+ bytes )?failed|(cuda|hip)ErrorMemoryAllocation"
            r"|not enough memory|insufficient memory|failed to reserve memory",
        ),
        (
            FaultKind.DEVICE_LOST,
            r"device[_ ]?lost|fallen off the bus|GPU is lost|no (CUDA|ROCm|HIP)-capable device|(cuda|hip)ErrorNoDevice"
            r"|(cuda|hip)ErrorDevicesUnavailable|(CUDA|HIP) error: (unknown error|initialization error)",
        ),
        (
            FaultKind.RESET_CLASS,
            r"VRAM is lost|GPU requires reset|reset required|ring \S+ timeout"
            r"|\bXid\b.{0,40}\b(46|48|64|79|95|119|120)\b|uncorrectable ECC|(cuda|hip)ErrorECCUncorrectable",
        ),
        (
            FaultKind.STICKY_DEVICE,
            r"illegal memory access|misaligned address|illegal instruction was encountered|invalid program counter"
            r"|unspecified launch failure|device-side assert|hardware stack error|launch timed out"
            r"|(cuda|hip)Error(IllegalAddress|LaunchFailure|LaunchTimeout|Assert|MisalignedAddress)"
            r"|memory access fault by GPU",
        ),
        (
            FaultKind.WORKER_KILLED_BY_DEVICE,
            r"(CUDA|HIP|ROCm|hsa|cublas|hipblas|ggml_vulkan:|vk::\w+)[ _]?(error|status)|CUBLAS_STATUS_",
        ),
    )
)
"""First match wins; a row's words are those of the drivers and of ggml's backends."""

_MENDED = re.compile(r"pinned memory|skipping|fallback|falling back|\bwarning\b", re.IGNORECASE)
"""The engine went on after such a line: it names no cause."""

START_TABLE: dict[str, FaultKind] = {
    "allocation": FaultKind.ALLOCATION,
    "device": FaultKind.DEVICE_LOST,
    "probe": FaultKind.PROBE_FAILED,
}
"""By the code of StartFailed. The other codes are about files and say nothing about a device."""

_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "was killed from outside (SIGKILL)",
    signal.SIGTERM: "was ended from outside (SIGTERM)",
    signal.SIGABRT: "gave itself up (SIGABRT)",
    signal.SIGSEGV: "touched memory it does not have (SIGSEGV)",
    signal.SIGBUS: "lost the file under its mapped memory (SIGBUS: was the model file changed, or did its disk fail?)",
    signal.SIGILL: "met an instruction this processor does not know (SIGILL)",
    signal.SIGXCPU: "used more processor time than it may (SIGXCPU)",
    signal.SIGFPE: "divided by zero (SIGFPE)",
}

_NOISE = re.compile(
    r'^(\s*File ".*", line \d+|\s*\.\.\.|(Current )?[Tt]hread 0x|Extension modules:|Traceback \(|Fatal Python error'
    r"|\s*<no Python frame>|\s*\^|Stack \(most recent)"
)
"""Lines of a stack trace: where it died, not why."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one worker process."""

    cause: str
    """One sentence for people."""
    kind: FaultKind | None
    """None: not a fault, it was asked to end."""
    at: float
    """Wall time, seconds since the epoch."""
    code: int | None = None
    """Exit code; None when a signal ended it, or when it is not known."""
    signal: int | None = None
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of an end that nobody ordered."""

    return_code: int | None
    log_tail: Sequence[str]
    start_failed: StartFailed | None = None
    was_ready: bool = False
    oom_kills: int = 0
    """How many processes the kernel killed for lack of memory while this one lived (/proc/vmstat)."""
    circumstance: str | None = None
    """What the gateway saw, when that is more than an exit: "closed its connection"."""
    kind: FaultKind | None = None
    """The kind, where the circumstance alone decides it (a stall, rubbish on the wire)."""


def explain(evidence: Evidence, at: float) -> Death:
    """Judge an unordered death. `at` is wall time in seconds since the epoch."""
    code = evidence.return_code
    if evidence.circumstance is not None:
        speaks = evidence.kind is FaultKind.CUT_SHORT  # it fell by itself, perhaps with its reason in the log
    else:
        speaks = code not in (-signal.SIGKILL, -signal.SIGTERM)  # killed from outside: what it wrote is no evidence
    kind, line = _from_log(evidence.log_tail) if speaks else (None, None)
    if evidence.start_failed is not None:
        said = evidence.start_failed
        kind = START_TABLE.get(said.code) or kind or FaultKind.UNCLASSIFIED_DEATH
        cause = f"The worker could not start: {said.message.rstrip('.')}."
    else:
        kind = kind or evidence.kind or FaultKind.UNCLASSIFIED_DEATH
        what = evidence.circumstance or _how_it_ended(evidence)
        cause = f"The worker {what}"
        if speaks:
            line = line or last_words(evidence.log_tail)
            if line is not None:
                cause += f", after writing: {line.rstrip('.')}"
            elif not evidence.was_ready:
                cause += " before it was ready, without a word"
        cause += "."
    return Death(
        cause=cause,
        kind=kind,
        at=at,
        code=code if code is not None and code >= 0 else None,
        signal=-code if code is not None and code < 0 else None,
        log_tail=tuple(evidence.log_tail),
    )


def last_words(lines: Sequence[str]) -> str | None:
    """The last line that says something; stack frames do not."""
    for line in reversed(lines[-_LINES_SEARCHED:]):
        if line.strip() and not _NOISE.match(line):
            return line.strip()
    return None


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since boot; 0 where that is not told."""
    try:
        with Path("/proc/vmstat").open(encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def _from_log(lines: Sequence[str]) -> tuple[FaultKind | None, str | None]:
    recent = [line.strip() for line in lines[-_LINES_SEARCHED:] if not _MENDED.search(line)]
    for kind, pattern in LOG_TABLE:
        for line in reversed(recent):
            if pattern.search(line):
                return kind, line
    return None, None


def _how_it_ended(evidence: Evidence) -> str:
    code = evidence.return_code
    if code is None:
        return "died, and its exit is not known yet"
    if code >= 0:
        return f"ended by itself with exit code {code}"
    if -code == signal.SIGKILL and evidence.oom_kills:
        return "was killed by the kernel because the machine ran out of memory (SIGKILL)"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return _SIGNALS.get(-code, f"was ended by {name}")
