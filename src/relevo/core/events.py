"""Every record that crosses a boundary: gateway and worker, gateway and text process, service and dialect.

Frames between processes are MessagePack of one of these tagged records, each
preceded by its length (4 bytes, big endian; at most MAX_FRAME_BYTES).
Nothing here does anything; readers learn the protocol by reading this page.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_FRAME_BYTES = 1 << 20


class _Frame(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of everything that travels between processes. The class name is the tag."""


# ---------------------------------------------------------------- to a llama worker


class StartModel(_Frame, frozen=True):
    """First frame: load this model, prove it can compute, then answer Ready or StartFailed."""

    model: str
    route: str  # gpu | hybrid | cpu | backup
    path: str
    libraries: str  # folder with libllama, libggml and the backends
    device: str = "cpu"  # ggml device name ("Vulkan0", "CUDA0") or "cpu"
    cpu_variant: str | None = None  # e.g. "haswell": load this CPU library instead of the best
    gpu_layers: int = 0
    host_expert_layers: int = 0  # so many of the first layers on the device leave their experts in host RAM
    context_tokens: int = 4096  # of the whole pool (fast) or of each slot (strict)
    slots: int = 8
    batch_tokens: int = 512  # rows of one step, all sequences together
    ubatch_tokens: int = 128
    prefill_chunk_tokens: int = 64  # prompt rows of one step while others decode
    kv_type: str = "f16"  # f16 | q8_0
    flash_attention: bool = True
    profile: str = "fast"  # fast | strict
    threads: int = 1
    use_mmap: bool = True
    repack: bool = True


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. The seed is effective: drawn once at acceptance if the client gave none."""

    seed: int = 0  # 0 .. 2**64-1
    temperature: float = 0.8
    top_k: int = 40  # 0: off
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_tokens: int = 64
    logit_bias: dict[int, float] = {}


class ChoiceStart(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the n answers: what of it exists already (after a handover), and how far it may go."""

    index: int
    max_output_tokens: int
    output_tokens: list[int] = []  # drawn before; fed again, never drawn again
    delivered_bytes: int = 0  # of text the client already has; the fold emits only past it
    held_tokens: int | None = None  # how far it may go now: output it holds cells for; None: up to its limit


class Submit(_Frame, frozen=True):
    """Run this attempt. Prompt tokens were counted at acceptance and are never computed again."""

    request_id: str
    attempt: int
    prompt_tokens: list[int]
    choices: list[ChoiceStart]
    sampling: Sampling
    stop: list[str] = []
    logprobs: int | None = None  # None: none wanted; k: the drawn token's and the k best
    ignore_eos: bool = False


class Extend(_Frame, frozen=True):
    """From now on this choice holds cells for so many output tokens, all that it has among them.

    A choice that has drawn all it holds cells for pauses: it keeps its cells and draws nothing until it is extended.
    Harmless where it holds as many already, and where it has ended.
    """

    request_id: str
    attempt: int
    choice: int
    held_tokens: int


class Cancel(_Frame, frozen=True):
    """Stop this attempt at the end of the step. Answered by AttemptEnded."""

    request_id: str
    attempt: int


class Probe(_Frame, frozen=True):
    """A small real inference: greedy tokens after a fixed prompt. Answered by ProbeAnswer with the same number."""

    number: int
    tokens: int = 4


class Shutdown(_Frame, frozen=True):
    """End all attempts (as cancelled), free the model, exit 0."""


# -------------------------------------------------------------- from a llama worker


class Ready(_Frame, frozen=True):
    """The model is loaded and a real inference ran. Sizes are the engine's own buffer lines."""

    pid: int
    engine: str  # "llama.cpp v0.5.0 (ggml 0.25.1)"
    library: str  # which CPU library or GPU backend computes
    device: str
    device_description: str
    cells: int  # KV cells of the pool (fast) or of each slot (strict)
    slots: int
    vocabulary_tokens: int
    context_trained_tokens: int
    load_ms: float
    probe_tokens: list[int]  # the answer to the first probe
    # On a GPU route model, kv, state and compute are the device's alone; host_* is what it takes of host RAM beside.
    model_bytes: int | None = None  # weights; mapped ones count from the first to the last tensor that is used
    kv_bytes: int | None = None
    state_bytes: int | None = None  # of recurrent layers
    compute_bytes: int | None = None
    output_bytes: int | None = None  # always host RAM
    repacked_bytes: int | None = None  # weights once more, in the order this processor likes; always host RAM
    host_model_bytes: int | None = None
    host_kv_bytes: int | None = None
    host_state_bytes: int | None = None
    host_compute_bytes: int | None = None


class StartFailed(_Frame, frozen=True):
    """The worker could not become ready.

    `code`: library, layout, model_file, allocation, device, probe or internal.
    """

    code: str
    message: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token with its log probability before temperature and filters, and the best alternatives."""

    token_id: int
    bytes_: bytes
    logprob: float
    top: list[tuple[int, bytes, float]] = []


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one choice. `position` is the number of output tokens after it.

    `text` is what the fold released (may be empty while a stop string or half a
    character is held back). `finish` is None, "stop" or "length"; the last piece
    of a choice carries it together with all remaining text.
    """

    request_id: str
    attempt: int
    choice: int
    position: int
    tokens: list[int]
    text: str
    finish: str | None = None
    logprobs: list[TokenLogprob] | None = None


class Step(_Frame, frozen=True):
    """Everything one engine step produced, one frame a step."""

    pieces: list[Piece]


class Prefilled(_Frame, frozen=True):
    """Progress of an attempt's prompt, sent when a chunk was read."""

    request_id: str
    attempt: int
    done_tokens: int
    total_tokens: int


class AttemptEnded(_Frame, frozen=True):
    """The attempt holds nothing any more. `outcome`: completed | cancelled | failed (then `code` and `message`).

    Codes: invalid (our bug or the caller's: out of range), no_cells, engine, nan (logits not finite).
    """

    request_id: str
    attempt: int
    outcome: str
    code: str | None = None
    message: str | None = None
    prompt_ms: float = 0.0
    decode_ms: float = 0.0


class Heartbeat(_Frame, frozen=True):
    """Sent every 250 ms by a thread that native code cannot block."""

    steps: int
    in_step_ms: float  # 0 when idle
    running: int
    rss_bytes: int
    peak_rss_bytes: int | None = None  # the most that was ever resident
    data_bytes: int | None = None  # private writable memory as RLIMIT_DATA counts it: when reserved


class ProbeAnswer(_Frame, frozen=True):
    """The answer to Probe `number`. `ok` is False when logits were not finite or decode failed."""

    number: int
    ok: bool
    tokens: list[int]
    took_ms: float
    message: str | None = None


ToWorker = StartModel | Submit | Extend | Cancel | Probe | Shutdown
FromWorker = Ready | StartFailed | Step | Prefilled | AttemptEnded | Heartbeat | ProbeAnswer


# ------------------------------------------------------------------ text process


class StartText(_Frame, frozen=True):
    """First frame to a text process: load vocabulary and template of this model."""

    model: str
    path: str
    libraries: str
    chat_template: str | None = None  # path of a template that replaces the file's own (or the template itself)
    folder: str | None = None  # private folder for answers larger than a frame; without it they are refused


class Render(_Frame, frozen=True):
    """Render a chat with the model's template and count its tokens. `messages` and `tools` are as the client sent."""

    call: int
    messages: list[Any]
    tools: list[Any] | None = None
    variables: dict[str, Any] = {}  # more template variables, e.g. enable_thinking
    payload_path: str | None = None  # the whole record is in this file (models/payload.py): it exceeds a frame


class Tokenize(_Frame, frozen=True):
    """Count plain text. `special`: special tokens written out in the text are recognised."""

    call: int
    text: str
    add_bos: bool = True
    special: bool = False
    payload_path: str | None = None  # as in Render


class TextReady(_Frame, frozen=True):
    """The text process can render and count."""

    pid: int
    has_template: bool
    vocabulary_tokens: int
    context_trained_tokens: int
    template_digest: str | None = None
    tokenizer_digest: str | None = None


class Rendered(_Frame, frozen=True):
    """The answer to Render or Tokenize."""

    call: int
    tokens: list[int]
    text: str | None = None
    payload_path: str | None = None  # the whole record is in this file, which the reader deletes


class TextRefused(_Frame, frozen=True):
    """The text process could not do it. `code`: invalid | template | timeout | too_large."""

    call: int
    code: str
    message: str


ToText = StartText | Render | Tokenize | Shutdown
FromText = TextReady | StartFailed | Rendered | TextRefused | Heartbeat


# ------------------------------------------------------------- dialect and service


class Ask(msgspec.Struct, frozen=True):
    """The one internal request, whatever dialect it came in.

    None in a sampling field means the model's configured default. `body` is the
    request's JSON as it came, kept so that a restart can render it again.
    """

    owner: str  # id of the key, or "local" without keys
    model: str
    kind: str  # chat | completion
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    prompt: str | list[int] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    stop: list[str] = []
    max_output_tokens: int | None = None
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    store: bool = False
    policy: str | None = None  # auto | gpu-only | cpu-only; None: the model's, which the service writes here
    handover: str = "auto"  # auto | continuous | boundary
    priority: int = 0  # -100 to 100, its key's or lower
    deadline_s: float | None = None
    idempotency_key: str | None = None
    client_retry: int = 0  # x-stainless-retry-count
    body_digest: str = ""  # sha256 of the canonical body, hex
    variables: dict[str, Any] = {}

    @property
    def kept(self) -> bool:
        """A kept request outlives its connection; its events leave only after their commit."""
        return self.store or self.idempotency_key is not None


class Routed(msgspec.Struct, frozen=True, tag=True):
    """The request has a route now (first, and after each handover). `relevo` is the object of the outer contract."""

    relevo: dict[str, Any]


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Still in a lane. Becomes a comment line in a stream."""

    lane: str
    position: int
    eta_ms: float | None


class Delta(msgspec.Struct, frozen=True, tag=True):
    """Output of one choice. Offsets let a reader of the record see that nothing is missing or doubled."""

    choice: int
    text: str
    tokens: list[int]
    finish: str | None = None
    logprobs: list[TokenLogprob] | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens counted, all choices together."""

    prompt_tokens: int
    completion_tokens: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The last event of a request, or of this delivery of it when it became resumable.

    `state`: completed | cancelled | failed | resumable. `error` has message, type, code and, where it
    is resumable, checkpoint, resume and kept_until.
    """

    state: str
    usage: Usage
    relevo: dict[str, Any]
    reason: str | None = None
    error: dict[str, Any] | None = None


ServiceEvent = Routed | Waiting | Delta | Ended
