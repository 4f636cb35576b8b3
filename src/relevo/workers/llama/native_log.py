"""What the engine says while it loads: a bounded tail of lines, and the facts that only its log tells.

Sizes are printed to a hundredth of a MiB. Debug lines are too many to keep (thousands for a model of 80 layers); what
they tell of layers is read as they pass. The forms of the lines are llama.cpp v0.5.0's.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

MIB: Final = 1 << 20
_LOG_LINES_KEPT: Final = 2000
_DEBUG, _WARNING, _ERROR, _CONTINUED = 1, 3, 4, 5

_BUFFER_LINE = re.compile(r"(\S+)\s+(?:(model|KV|RS|compute|output)|DSV4 \S+ (state)) buffer size\s*=\s*([\d.]+) MiB")
_CACHE_LINE = re.compile(
    r"^llama_kv_cache: size =\s*[\d.]+ MiB \(\s*(\d+) cells,.*?"
    r"K \(\w+\):\s*([\d.]+) MiB, V \(\w+\):\s*([\d.]+) MiB"
)
_WIDTH_LINE = re.compile(r"^print_info: n_embd_([kv])_gqa\s+= (.*)$")
_CACHE_LAYER = re.compile(r"^llama_kv_cache: layer\s+(\d+): dev = (\S+)")
_PLACED_LAYER = re.compile(r"^load_tensors: layer\s+(\d+) assigned to device ([^\s,]+)")
_OVERRIDDEN = re.compile(r"^tensor (\S+) \(.*\) buffer type overridden to (\S+)")
_REPACKED_NAMES: Final = ("REPACK", "AMX", "KLEIDIAI", "SPACEMIT")


@dataclass(frozen=True, slots=True)
class Buffer:
    """One "... buffer size" line: whose memory, what it holds (model, KV, RS, compute, output), how much."""

    name: str
    kind: str
    bytes_: int

    @property
    def repacked(self) -> bool:
        """Whether it holds weights that were rewritten for this processor, beside the file's own."""
        return self.kind == "model" and any(word in self.name for word in _REPACKED_NAMES)


@dataclass(frozen=True, slots=True)
class Cache:
    """One KV cache (a model with a sliding window has two): cells of each stream, bytes of all, and where it lies."""

    cells: int
    key_bytes: int
    value_bytes: int
    layers: dict[int, str]
    """Every layer that keeps keys and values in it, and the device they are on."""


@dataclass(slots=True)
class LoadFacts:
    """What one load said of itself."""

    buffers: list[Buffer] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    placed: dict[int, str] = field(default_factory=dict)
    """Device of each repeating layer; the output layer counts as one more."""
    overridden: list[str] = field(default_factory=list)
    """Tensors that were put elsewhere than their layer."""
    key_widths: tuple[int, ...] = ()
    value_widths: tuple[int, ...] = ()
    """Elements of a cell of each layer; one entry where all layers are alike."""
    cache_layers: dict[int, str] = field(default_factory=dict)
    """Of the cache that is just being made."""


class NativeLog:
    """What the library says. Warnings and errors also go to stderr at once."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_LOG_LINES_KEPT)
        self.errors: deque[str] = deque(maxlen=50)
        self.facts = LoadFacts()
        self._level = 0
        self._open = ""

    def begin_load(self) -> None:
        """Forget what earlier loads said."""
        self.errors.clear()
        self.lines.clear()
        self.facts = LoadFacts()

    def add(self, level: int, text: str) -> None:
        """One fragment from the library; lines come in one or several."""
        if level != _CONTINUED:
            self._level = level
        self._open += text
        *whole, self._open = self._open.split("\n")
        for line in whole:
            if not line.strip():
                continue
            if self._level == _DEBUG:
                self._take_detail(line)
                continue
            self.lines.append(line)
            self._take(line)
            if self._level >= _WARNING:
                if self._level == _ERROR:
                    self.errors.append(line)
                print(line, file=sys.stderr, flush=True)

    def buffer_bytes(self, kind: str, device: str | None = None) -> int | None:
        """Sum of the buffers of this kind (model, KV, RS, compute, output); None when no such line was seen.

        With a device name only its own buffers count.
        """
        return self._sum(b for b in self.facts.buffers if b.kind == kind and (device is None or b.name == device))

    def host_bytes(self, kind: str, device: str | None) -> int | None:
        """Sum of the buffers of this kind that are not `device`'s, without repacked weights."""
        found = (b for b in self.facts.buffers if b.kind == kind and b.name != device and not b.repacked)
        return self._sum(found)

    def repacked_bytes(self) -> int | None:
        """Sum of the buffers of repacked weights; None when there are none."""
        return self._sum(b for b in self.facts.buffers if b.repacked)

    def find(self, pattern: str) -> re.Match[str] | None:
        """The newest line in which this regular expression is found."""
        expression = re.compile(pattern)
        for line in reversed(self.lines):
            if found := expression.search(line):
                return found
        return None

    @staticmethod
    def _sum(buffers: Iterable[Buffer]) -> int | None:
        sizes = [buffer.bytes_ for buffer in buffers]
        return sum(sizes) if sizes else None

    def _take(self, line: str) -> None:
        facts = self.facts
        if found := _BUFFER_LINE.search(line):
            buffer = Buffer(found[1], found[2] or "RS", _bytes(found[4]))
            if buffer.kind == "compute":  # said again whenever the engine plans its graphs anew: the newest counts
                facts.buffers = [b for b in facts.buffers if (b.name, b.kind) != (buffer.name, buffer.kind)]
            facts.buffers.append(buffer)
        elif found := _CACHE_LINE.search(line):
            facts.caches.append(Cache(int(found[1]), _bytes(found[2]), _bytes(found[3]), facts.cache_layers))
            facts.cache_layers = {}
        elif found := _WIDTH_LINE.search(line):
            widths = tuple(int(width) for width in re.findall(r"\d+", found[2]))
            if found[1] == "k":
                facts.key_widths = widths
            else:
                facts.value_widths = widths

    def _take_detail(self, line: str) -> None:
        if found := _CACHE_LAYER.match(line):
            self.facts.cache_layers[int(found[1])] = found[2]
        elif found := _PLACED_LAYER.match(line):
            self.facts.placed[int(found[1])] = found[2]
        elif found := _OVERRIDDEN.match(line):
            self.facts.overridden.append(found[1])


def reported_bytes(log: NativeLog, device: str | None) -> dict[str, int | None]:
    """The sizes in Ready, by field. `device` None: a CPU route, where everything is the host's and is said once.

    A kind of memory the engine printed nothing of is none at all, but a load without weights is not known.
    """
    host = {kind: log.host_bytes(kind, device) or 0 for kind in ("KV", "RS", "compute")}
    found: dict[str, int | None] = {
        "output_bytes": log.buffer_bytes("output"),
        "repacked_bytes": log.repacked_bytes() or 0,
    }
    if device is None:
        return found | {
            "model_bytes": log.host_bytes("model", None),
            "kv_bytes": host["KV"],
            "state_bytes": host["RS"],
            "compute_bytes": host["compute"],
        }
    return found | {
        "model_bytes": log.buffer_bytes("model", device),
        "kv_bytes": log.buffer_bytes("KV", device) or 0,
        "state_bytes": log.buffer_bytes("RS", device) or 0,
        "compute_bytes": log.buffer_bytes("compute", device) or 0,
        "host_model_bytes": log.host_bytes("model", device),
        "host_kv_bytes": host["KV"],
        "host_state_bytes": host["RS"],
        "host_compute_bytes": host["compute"],
    }


def _bytes(mebibytes: str) -> int:
    return round(float(mebibytes) * MIB)
