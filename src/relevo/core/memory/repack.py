"""Which weights a CPU keeps in another order, made for its wide registers, in memory of the process' own.

Where the file is mapped that is a second copy beside the pages of the file; where it is read, it is the only one.
Source: ggml_repack_get_optimal_repack_type and the AMX buffer type, ggml/src/ggml-cpu, llama.cpp v0.5.0; seen on
Zen 4: of a Q4_K_M model the q4_k matrices, none of a Q4_1 model.
"""

from __future__ import annotations

from collections.abc import Iterable

ROWS_STEP = 4
"""Matrices of fewer rows than a multiple of this stay as they are. (Some kinds want 8: then this is a bound.)"""

_BY_INSTRUCTIONS: dict[str, frozenset[str]] = {
    "avx2": frozenset({"q4_0", "q4_k", "iq4_nl", "mxfp4"}),
    "avx512f": frozenset({"q2_k"}),
    "amx_int8": frozenset({"q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_xs"}),
    "asimddp": frozenset({"q4_0", "q4_k", "q5_k", "q6_k", "q8_0", "iq4_nl", "mxfp4"}),
}
"""Number types by the instructions, as /proc/cpuinfo names them, that their kernels are made of."""

X86_TYPES = _BY_INSTRUCTIONS["avx2"] | _BY_INSTRUCTIONS["avx512f"]
"""What an x86 processor without tiles (AMX) takes at most."""

ALL_TYPES = frozenset().union(*_BY_INSTRUCTIONS.values())
"""What any processor takes: a bound where it is not known which this is."""


def instructions_in(cpuinfo: str) -> frozenset[str]:
    """Instructions that a processor has, out of the text of /proc/cpuinfo (x86 calls them flags, ARM Features)."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return frozenset(
        word for name, _, words in lines if name.strip() in ("flags", "Features") for word in words.split()
    )


def repacked_types(instructions: Iterable[str]) -> frozenset[str]:
    """Number types that a processor with these instructions ("avx2", "asimddp") keeps in another order."""
    return frozenset().union(*(_BY_INSTRUCTIONS.get(name, frozenset()) for name in instructions))
