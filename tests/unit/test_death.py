"""What a worker left behind becomes a cause and a kind."""

from __future__ import annotations

import signal

import pytest

from relevo.core.breaker import FaultKind
from relevo.core.events import StartFailed
from relevo.replicas.death import Evidence, explain, last_words

NOISE = (
    "Fatal Python error: Aborted",
    "Current thread 0x00007f (most recent call first):",
    '  File "worker.py", line 3 in step',
)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("CUDA error: out of memory", FaultKind.ALLOCATION),
        ("alloc_buffer: allocating 512.00 MiB on device 0: cudaMalloc failed: out of memory", FaultKind.ALLOCATION),
        ("terminate called after throwing an instance of 'std::bad_alloc'", FaultKind.ALLOCATION),
        ("ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory", FaultKind.ALLOCATION),
        ("ggml_aligned_malloc: insufficient memory (attempted to allocate 64.00 MB)", FaultKind.ALLOCATION),
        ("CUDA error: an illegal memory access was encountered", FaultKind.STICKY_DEVICE),
        ("CUDA error: unspecified launch failure", FaultKind.STICKY_DEVICE),
        ("Memory access fault by GPU node-1 on address 0x7f", FaultKind.STICKY_DEVICE),
        ("what():  vk::Queue::submit: ErrorDeviceLost", FaultKind.DEVICE_LOST),
        ("CUDA error: no CUDA-capable device is detected", FaultKind.DEVICE_LOST),
        ("CUDA error: uncorrectable ECC error encountered", FaultKind.RESET_CLASS),
        ("CUDA error: the provided PTX was compiled with an unsupported toolchain.", FaultKind.WORKER_KILLED_BY_DEVICE),
        ("ggml_vulkan: error device busy at ggml-vulkan.cpp:12", FaultKind.WORKER_KILLED_BY_DEVICE),
        ("ggml_cuda_host_malloc: failed to allocate 64.00 MiB of pinned memory: x", FaultKind.UNCLASSIFIED_DEATH),
        ("GGML_ASSERT(n_tokens <= n_batch) failed", FaultKind.UNCLASSIFIED_DEATH),
    ],
)  # fmt: skip
def test_the_words_of_drivers_and_engines_name_the_kind(line: str, kind: FaultKind) -> None:
    death = explain(Evidence(-signal.SIGABRT, ("loading", line, *NOISE)), 1.0)
    assert death.kind is kind
    assert line.rstrip(".") in death.cause and "SIGABRT" in death.cause
    assert death.signal == signal.SIGABRT and death.code is None


def test_who_is_killed_from_outside_is_not_judged_by_what_it_wrote_before() -> None:
    death = explain(
        Evidence(-signal.SIGKILL, ("CUDA error: out of memory, trying a smaller buffer",), was_ready=True), 1.0
    )
    assert death.kind is FaultKind.UNCLASSIFIED_DEATH
    assert death.cause == "The worker was killed from outside (SIGKILL)."


def test_the_kernel_running_out_of_memory_is_told_apart_from_a_kill() -> None:
    assert "ran out of memory" in explain(Evidence(-signal.SIGKILL, (), oom_kills=1), 1.0).cause


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("allocation", FaultKind.ALLOCATION),
        ("device", FaultKind.DEVICE_LOST),
        ("probe", FaultKind.PROBE_FAILED),
        ("model_file", FaultKind.UNCLASSIFIED_DEATH),
        ("something new", FaultKind.UNCLASSIFIED_DEATH),
    ],
)
def test_a_worker_that_said_why_is_believed(code: str, kind: FaultKind) -> None:
    death = explain(Evidence(1, (), StartFailed(code, "Because of this.")), 1.0)
    assert death.kind is kind and death.cause == "The worker could not start: Because of this."


def test_a_circumstance_decides_where_there_is_one() -> None:
    evidence = Evidence(-signal.SIGKILL, ("CUDA error: x",), circumstance="sent no heartbeat", kind=FaultKind.STALL)
    death = explain(evidence, 1.0)
    assert death.kind is FaultKind.STALL and death.cause == "The worker sent no heartbeat."


def test_who_closed_its_connection_may_have_written_why() -> None:
    cut = {"circumstance": "closed its connection but did not end, so it was killed", "kind": FaultKind.CUT_SHORT}
    silent = explain(Evidence(-signal.SIGKILL, (), was_ready=True, **cut), 1.0)
    assert silent.kind is FaultKind.CUT_SHORT and silent.cause.endswith("so it was killed.")
    telling = explain(Evidence(-signal.SIGKILL, ("MemoryError: no more",), **cut), 1.0)
    assert telling.kind is FaultKind.ALLOCATION and telling.cause.endswith("after writing: MemoryError: no more.")


def test_an_unknown_end_is_not_guessed() -> None:
    death = explain(Evidence(None, (), was_ready=True), 1.0)
    assert death.code is None and death.signal is None and "not known" in death.cause
    assert "signal 63" in explain(Evidence(-63, ()), 1.0).cause


def test_last_words_are_not_stack_frames() -> None:
    assert last_words(("first", "the reason", "", *NOISE)) == "the reason"
    assert last_words(NOISE) is None
