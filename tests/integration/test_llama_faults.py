"""What a worker does with impossible orders, damaged files, too little memory and a gateway that is gone."""

from __future__ import annotations

import os
import signal
import time

import msgspec
import pytest

from relevo.core.events import ChoiceStart, Heartbeat, Ready, Sampling, Shutdown, StartFailed
from tests.integration.llama_process import LlamaProcess, submit

PROMPT = [1, 100, 200, 300]
CHOICE = ChoiceStart(0, 4)


@pytest.fixture(scope="module")
def worker(libraries, demo_model):
    with LlamaProcess(libraries, demo_model) as worker:
        ready = worker.start(slots=4, context_tokens=512)
        assert isinstance(ready, Ready), ready
        yield worker


def changed(**changes):
    return msgspec.structs.replace(submit(PROMPT), **changes)


HOSTILE = {
    "no prompt": (changed(prompt_tokens=[]), "invalid"),
    "a token past the vocabulary": (changed(prompt_tokens=[49152]), "invalid"),
    "a negative token": (changed(prompt_tokens=[1, -5]), "invalid"),
    "a token of 64 bits": (changed(prompt_tokens=[1 << 62]), "invalid"),
    "no choices": (changed(choices=[]), "invalid"),
    "300 choices": (changed(choices=[ChoiceStart(i, 4) for i in range(300)]), "invalid"),
    "two choices of one number": (changed(choices=[CHOICE, CHOICE]), "invalid"),
    "a negative choice": (changed(choices=[ChoiceStart(-1, 4)]), "invalid"),
    "no output": (changed(choices=[ChoiceStart(0, 0)]), "invalid"),
    "a negative limit": (changed(choices=[ChoiceStart(0, -(1 << 60))]), "invalid"),
    "a limit of 62 bits": (changed(choices=[ChoiceStart(0, 1 << 62)]), "invalid"),
    "bad output tokens": (changed(choices=[ChoiceStart(0, 4, [1 << 40])]), "invalid"),
    "output past its limit": (changed(choices=[ChoiceStart(0, 2, [5, 6, 7])]), "invalid"),
    "a negative offset": (changed(choices=[ChoiceStart(0, 4, [], -1)]), "invalid"),
    "logprobs by the million": (changed(logprobs=10**6), "invalid"),
    "a negative seed": (changed(sampling=Sampling(seed=-1)), "invalid"),
    "no number as temperature": (changed(sampling=Sampling(temperature=float("nan"))), "invalid"),
    "bias on nothing": (changed(sampling=Sampling(logit_bias={10**9: 1.0})), "invalid"),
    "an empty stop string": (changed(stop=[""]), "invalid"),
    "more output than cells": (changed(choices=[ChoiceStart(0, 100_000)]), "no_cells"),
    "a prompt beyond the cells": (changed(prompt_tokens=[5] * 5000), "no_cells"),
    "more choices than slots": (changed(choices=[ChoiceStart(i, 4) for i in range(5)]), "no_cells"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_impossible_order_fails_alone_and_the_worker_goes_on(worker, name):
    order, code = HOSTILE[name]
    good = submit(PROMPT, 4)
    refused, served = worker.run(order, good)
    assert (refused.ended.outcome, refused.ended.code) == ("failed", code)
    assert refused.ended.message.endswith(".")
    assert served.ended.outcome == "completed"


def test_more_work_than_slots_is_refused_and_the_rest_is_served(worker):
    results = worker.run(*(submit(PROMPT, 12, ignore_eos=True) for _ in range(7)))
    codes = [result.ended.code for result in results]
    assert codes == [None] * 4 + ["no_cells"] * 3


def test_a_prompt_that_fills_the_pool_to_the_last_cell_is_served(worker):
    [result] = worker.run(submit([7] * 470, 10, ignore_eos=True))
    assert len(result.only.tokens) == 10
    assert result.prefilled == sorted(result.prefilled)
    assert result.prefilled[-1] == 470


def test_heartbeats_come_while_it_computes(worker):
    worker.heartbeats.clear()
    worker.run(submit([9] * 440, 20, ignore_eos=True))
    assert worker.heartbeats
    assert max(beat.in_step_ms for beat in worker.heartbeats) > 0
    assert max(beat.running for beat in worker.heartbeats) == 1
    assert worker.heartbeats[-1].rss_bytes > 50 << 20


def test_shutdown_ends_the_attempts_and_exits_cleanly(libraries, demo_model):
    with LlamaProcess(libraries, demo_model) as worker:
        worker.start()
        order = submit(PROMPT, 500, ignore_eos=True)
        worker.frames.send(order)
        worker.frames.send(Shutdown())
        result = worker.collect([(order.request_id, 1)])[order.request_id, 1]
        assert result.ended.outcome == "cancelled"
        assert worker.receive() is None
        assert worker.process.wait(5) == 0


def test_the_process_ends_within_a_second_of_its_socket_even_inside_a_native_call(libraries, demo_model):
    with LlamaProcess(libraries, demo_model) as worker:
        worker.start(context_tokens=4096, batch_tokens=2048, ubatch_tokens=2048)
        worker.frames.send(submit([9] * 2000, 50))  # one decode call of several seconds
        while not any(beat.in_step_ms > 200 for beat in worker.heartbeats):
            worker.heartbeats.append(worker.frames.receive(Heartbeat))
        began = time.monotonic()
        worker.socket.close()
        worker.process.wait(5)
        assert time.monotonic() - began < 1


def test_a_killed_worker_leaves_a_closed_socket(libraries, demo_model):
    with LlamaProcess(libraries, demo_model) as worker:
        worker.start()
        os.kill(worker.process.pid, signal.SIGKILL)
        assert worker.receive() is None


def test_a_truncated_model_is_refused_as_a_damaged_file(libraries, demo_model, tmp_path):
    short = tmp_path / "short.gguf"
    with demo_model.open("rb") as whole:
        short.write_bytes(whole.read(40_000_000))
    with LlamaProcess(libraries, short) as worker:
        answer = worker.start()
        assert isinstance(answer, StartFailed)
        assert answer.code == "model_file", answer
        assert worker.process.wait(5) != 0


def test_a_file_that_is_no_model_is_refused(libraries, tmp_path):
    other = tmp_path / "notes.gguf"
    other.write_text("not a model")
    with LlamaProcess(libraries, other) as worker:
        assert worker.start() == StartFailed("model_file", f"The file {other} is not a GGUF model.")


def test_too_little_memory_is_told_as_such(libraries, demo_model):
    with LlamaProcess(libraries, demo_model, data_limit_bytes=700 << 20) as worker:
        answer = worker.start(context_tokens=1 << 16)  # 1.4 GiB of cells
        assert isinstance(answer, StartFailed)
        assert answer.code == "allocation", answer


def test_a_device_that_is_not_there_is_named(libraries, demo_model):
    with LlamaProcess(libraries, demo_model) as worker:
        answer = worker.start(device="CUDA7", gpu_layers=99)
        assert isinstance(answer, StartFailed)
        assert answer.code == "device"
        assert "CUDA7" in answer.message


def test_a_folder_without_libraries_is_named(demo_model, tmp_path):
    with LlamaProcess(tmp_path, demo_model) as worker:
        answer = worker.start()
        assert isinstance(answer, StartFailed)
        assert (answer.code, str(tmp_path) in answer.message) == ("library", True)


def test_another_cpu_library_is_used_when_asked_for(libraries, demo_model):
    with LlamaProcess(libraries, demo_model) as worker:
        assert worker.start(cpu_variant="haswell").library == "libggml-cpu-haswell.so"
    with LlamaProcess(libraries, demo_model) as worker:
        assert worker.start(cpu_variant="z80").code == "library"
