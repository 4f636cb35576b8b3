"""A loaded model with one context: load and prove it, decode rows, read logits, move sequences.

Everything that reaches native code is checked by whoever fills the rows; nothing here is called by two threads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from relevo.core.cells import PROBE_CELLS
from relevo.core.errors import LibraryError, ModelFileError
from relevo.core.events import StartModel
from relevo.workers.llama.landing import what_did_not_land
from relevo.workers.llama.native import LayoutMismatch, Native, load_native
from relevo.workers.llama.parameters import (
    KV_TYPES,
    UNQUANTIZED,
    ModelParameters,
    context_parameters,
    model_parameters,
    sequences,
)
from relevo.workers.llama.vocabulary import Vocabulary

PROBE_TOKENS_MAX: Final = 16
_PROBE_TEXT: Final = "The capital of France is"
_MEMORY_WORDS = re.compile(r"alloc|out of memory|OutOf\w*Memory|mmap failed|bad_alloc|Cannot allocate", re.IGNORECASE)


class StartFailure(Exception):
    """The worker cannot become ready; `code` is one of StartFailed's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ProbeFault(Exception):
    """The probe's inference did not work; the message says how."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A loaded llama_model, and what its parameters point to: the engine reads that again later."""

    handle: Any
    parameters: ModelParameters


class Rows:
    """The rows of one decode call, in memory that is reused. Filled by `add`, at most `capacity`."""

    def __init__(self, ffi: Any, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.outputs = 0
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._sequence_counts = np.ones(capacity, np.int32)
        self._sequences = np.zeros(capacity, np.int32)
        self._wanted = np.zeros(capacity, np.int8)
        first = self._sequences.ctypes.data
        self._sequence_pointers = np.arange(capacity, dtype=np.uintp) * self._sequences.itemsize + first
        self.batch = ffi.new("llama_batch *")[0]
        self.batch.token = ffi.cast("llama_token *", self._tokens.ctypes.data)
        self.batch.embd = ffi.NULL
        self.batch.pos = ffi.cast("llama_pos *", self._positions.ctypes.data)
        self.batch.n_seq_id = ffi.cast("int32_t *", self._sequence_counts.ctypes.data)
        self.batch.seq_id = ffi.cast("llama_seq_id **", self._sequence_pointers.ctypes.data)
        self.batch.logits = ffi.cast("int8_t *", self._wanted.ctypes.data)

    def clear(self) -> None:
        """Start anew."""
        self.count = self.outputs = 0

    def add(self, tokens: Sequence[int] | npt.NDArray[np.int32], position: int, sequence: int, output: bool) -> int:
        """Append tokens of one sequence from this position on; `output` asks for the logits of the last.

        Returns the row number of the last.
        """
        first, last = self.count, self.count + len(tokens)
        assert len(tokens) > 0
        assert last <= self.capacity
        self._tokens[first:last] = tokens
        self._positions[first:last] = np.arange(position, position + len(tokens))
        self._sequences[first:last] = sequence
        self._wanted[first:last] = 0
        self._wanted[last - 1] = output
        self.outputs += output
        self.count = last
        return last - 1


class Model:
    """Weights, context and vocabulary of one GGUF file on one device. Made by `load`."""

    def __init__(self, native: Native, weights: Weights, context: Any, start: StartModel) -> None:
        self.native = native
        self.vocabulary = Vocabulary(native, weights.handle)
        self.vocabulary_tokens = self.vocabulary.n_vocab
        self.strict = start.profile == "strict"
        self.slots = start.slots
        self._call = native.call
        self._weights = weights
        self._context = context
        self._memory = native.call.llama_get_memory(context)
        per_sequence = int(native.call.llama_n_ctx_seq(context))
        self.cells = per_sequence if self.strict else min(start.context_tokens, per_sequence - PROBE_CELLS)
        self.scratch_sequence = None if self.strict else start.slots
        self.rows = Rows(native.ffi, start.batch_tokens)
        self.ubatch_tokens = min(start.ubatch_tokens, start.batch_tokens)
        self._probe_prompt = self._make_probe_prompt()

    def decode(self) -> int:
        """Compute `rows`. Code 0: done, 1: no cells, 2: aborted, -1: invalid, -2: no memory, below: fatal."""
        self.rows.batch.n_tokens = self.rows.count
        code = int(self._call.llama_decode(self._context, self.rows.batch))
        if code == 0:
            self._call.llama_synchronize(self._context)  # a GPU returns early; times and cancels need the real end
        return code

    def logits(self, row: int) -> npt.NDArray[np.float32] | None:
        """Logits of a row that asked for them: a view that the next decode overwrites. None: there are none."""
        pointer = self._call.llama_get_logits_ith(self._context, row)
        if not pointer:
            return None
        return np.frombuffer(self.native.ffi.buffer(pointer, self.vocabulary_tokens * 4), np.float32)

    def copy_sequence(self, source: int, target: int) -> None:
        """Give `target` all cells of `source`. Only whole sequences: a part would abort where streams are split."""
        self._call.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def remove_sequence(self, sequence: int) -> None:
        """Free all cells of a sequence."""
        self._call.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def clear(self) -> None:
        """Free all cells of all sequences, and zero them."""
        self._call.llama_memory_clear(self._memory, True)

    def free(self) -> None:
        """Give the memory back. The object is useless afterwards."""
        self._call.llama_free(self._context)
        self._call.llama_model_free(self._weights.handle)

    def probe(self, tokens: int, sequence: int) -> list[int]:
        """A small real inference in this (empty) sequence: greedy tokens after a fixed prompt.

        Raises ProbeFault when decoding fails or logits are not finite.
        """
        output: list[int] = []
        feed = self._probe_prompt
        position = 0
        try:
            while len(output) < min(tokens, PROBE_TOKENS_MAX):
                self.rows.clear()
                row = self.rows.add(feed, position, sequence, output=True)
                if (code := self.decode()) != 0:
                    raise ProbeFault(f"Decoding answered {code}.")
                logits = self.logits(row)
                if logits is None or not np.isfinite(logits.max()):
                    raise ProbeFault("The logits are not finite.")
                output.append(int(logits.argmax()))
                position += len(feed)
                feed = output[-1:]
        finally:
            self.remove_sequence(sequence)
        return output

    def _make_probe_prompt(self) -> list[int]:
        """The same for the same vocabulary. One that cannot tokenize is given spread-out ids."""
        tokens = self.vocabulary.tokenize(_PROBE_TEXT)[: PROBE_CELLS - PROBE_TOKENS_MAX]
        count = self.vocabulary_tokens
        return tokens or [(count * step // 7 + step) % count for step in range(1, 7)]


def load(start: StartModel) -> tuple[Native, Model]:
    """Load libraries, model and context as asked, and prove that what was asked is what there is.

    Raises StartFailure.
    """
    check(start)
    native = open_libraries(start)
    device = find_device(native, start)
    weights = load_weights(native, start, device)
    context = make_context(native, weights, start)
    return native, Model(native, weights, context, start)


def open_libraries(start: StartModel) -> Native:
    """The libraries a load needs. Raises StartFailure."""
    try:
        return load_native(Path(start.libraries), start.cpu_variant, gpu=start.device != "cpu")
    except LayoutMismatch as e:
        raise StartFailure("layout", e.message) from None
    except LibraryError as e:
        raise StartFailure("library", e.message) from None


def find_device(native: Native, start: StartModel) -> Any | None:
    """The device that layers go to; None for the CPU. Raises StartFailure when it is not there."""
    if start.device == "cpu":
        return None
    device = native.device_handle(start.device)
    if device is None:
        known = ", ".join(d.name for d in native.devices() if d.kind != "cpu") or "no GPU at all"
        raise StartFailure("device", f"There is no device {start.device} here; the libraries see {known}.")
    return device


def check(start: StartModel) -> None:
    """Whether all that is asked is within what native code bears. Raises StartFailure."""
    rules = (
        (start.profile in ("fast", "strict"), "The profile must be fast or strict."),
        (start.kv_type in KV_TYPES, f"The KV type must be one of {', '.join(KV_TYPES)}."),
        (1 <= start.slots <= 255, "There must be between 1 and 255 slots."),
        (1 <= start.threads <= 512, "There must be between 1 and 512 threads."),
        (64 <= start.context_tokens <= 1 << 24, "The context must have between 64 and 2**24 tokens."),
        (start.context_tokens * start.slots < 1 << 31, "Context times slots must stay below 2**31 tokens."),
        (start.slots + 1 <= start.batch_tokens <= 1 << 16, "A step must have more rows than slots, and at most 65536."),
        (start.batch_tokens >= PROBE_CELLS, f"A step must have at least {PROBE_CELLS} rows."),
        (1 <= start.ubatch_tokens <= 1 << 16, "A micro-batch must have between 1 and 65536 rows."),
        (start.prefill_chunk_tokens >= 1, "A prompt chunk must have at least one row."),
        (start.kv_type in UNQUANTIZED or start.flash_attention, "A quantized KV cache needs flash attention."),
        (0 <= start.host_expert_layers <= 1024, "Between 0 and 1024 layers can leave their experts to the host."),
    )
    for holds, sentence in rules:
        if not holds:
            raise StartFailure("internal", sentence)
    path = Path(start.path)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as e:
        raise StartFailure("model_file", f"The model file {path} cannot be read: {e.strerror}.") from None
    if magic != b"GGUF":
        raise StartFailure("model_file", f"The file {path} is not a GGUF model.")


def load_weights(native: Native, start: StartModel, device: Any | None, *, dry: bool = False) -> Weights:
    """Load the weights, or in a dry run only what the file says of them. Raises StartFailure."""
    call = native.call
    try:
        parameters = model_parameters(native, start, device, dry=dry)
    except ModelFileError as e:
        raise StartFailure("model_file", e.message) from None
    native.log.begin_load()
    handle = call.llama_model_load_from_file(os.fsencode(start.path), parameters.record)
    if handle == native.ffi.NULL:
        reason = _reason(native)
        if _MEMORY_WORDS.search(reason):
            raise StartFailure("allocation", f"There is not enough memory for the weights of {start.path}: {reason}")
        raise StartFailure("model_file", f"The model file {start.path} cannot be loaded: {reason}")
    weights = Weights(handle, parameters)
    try:
        _prove_weights(native, handle, start, dry)
    except StartFailure:
        call.llama_model_free(handle)
        raise
    return weights


def _prove_weights(native: Native, handle: Any, start: StartModel, dry: bool) -> None:
    call = native.call
    if not call.llama_model_has_decoder(handle) or call.llama_model_has_encoder(handle):
        raise StartFailure("model_file", f"The model {start.path} is not a decoder-only language model.")
    if call.llama_model_is_diffusion(handle):
        raise StartFailure("model_file", f"The model {start.path} is a diffusion model; only token by token ones run.")
    if start.device != "cpu" and (missing := what_did_not_land(native, handle, start, dry=dry)):
        raise StartFailure("device", missing)


def make_context(native: Native, weights: Weights, start: StartModel) -> Any:
    """A context for these weights, proved to be the one that was asked for. Raises StartFailure."""
    parameters = context_parameters(native, start)
    native.log.errors.clear()
    context = native.call.llama_init_from_model(weights.handle, parameters)
    if context == native.ffi.NULL:
        reason = _reason(native)
        code = "allocation" if _MEMORY_WORDS.search(reason) else "internal"
        raise StartFailure(code, f"A context of {parameters.n_ctx} tokens could not be made: {reason}")
    try:
        _prove_context(native, context, start)
    except StartFailure:
        native.call.llama_free(context)
        raise
    return context


def _prove_context(native: Native, context: Any, start: StartModel) -> None:
    """Read back what was asked: a field written to the wrong place shows here."""
    call, strict = native.call, start.profile == "strict"
    flash = "enabled" if start.flash_attention or strict else "disabled"
    read_back = (
        ("n_batch", call.llama_n_batch(context), start.batch_tokens),
        ("n_ubatch", call.llama_n_ubatch(context), min(start.ubatch_tokens, start.batch_tokens)),
        ("n_seq_max", call.llama_n_seq_max(context), sequences(start)),
        ("n_threads", call.llama_n_threads(context), start.threads),
        ("n_threads_batch", call.llama_n_threads_batch(context), start.threads),
        ("n_ctx", call.llama_n_ctx_seq(context) >= start.context_tokens, True),
        ("n_outputs_max", _logged(native, r"n_outputs_max\s+= (\d+)"), str(sequences(start))),
        ("flash_attn", _logged(native, r"flash_attn\s+= (\w+)"), flash),
        ("kv_unified", _logged(native, r"kv_unified\s+= (\w+)"), "false" if strict else "true"),
    )
    for name, found, asked in read_back:
        if found is not None and found != asked:
            raise StartFailure(
                "layout", f"The context has {name} {found} where {asked} was asked for; the library is another release."
            )


def _logged(native: Native, pattern: str) -> str | None:
    found = native.log.find(pattern)
    return found[1] if found else None


def _reason(native: Native) -> str:
    """The library's error lines as one sentence, the first being the cause."""
    lines = list(dict.fromkeys(line.strip().rstrip(".") for line in native.log.errors))
    return "; ".join(lines[:4])[:600] + "." if lines else "the library gave no reason."
