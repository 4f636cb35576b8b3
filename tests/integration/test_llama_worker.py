"""A real worker process with the real demo model: what it answers, and that it answers the same again."""

from __future__ import annotations

import math

import msgspec
import pytest

from relevo.core.events import Cancel, ChoiceStart, Extend, Heartbeat, Probe, ProbeAnswer, Ready, Sampling, Step
from relevo.workers.llama.native import load_native
from relevo.workers.llama.vocabulary import Vocabulary
from tests.integration.llama_process import GREEDY, LlamaProcess, submit

SEEDED = Sampling(seed=42, temperature=0.9, top_k=40, top_p=0.95, min_p=0.02)
PENALIZED = Sampling(seed=7, temperature=1.0, repeat_penalty=1.2, presence_penalty=0.3, penalty_last_tokens=32)


@pytest.fixture(scope="module")
def vocabulary(libraries, demo_model):
    vocabulary = Vocabulary.load(load_native(libraries, backends=False), demo_model)
    yield vocabulary
    vocabulary.close()


@pytest.fixture(scope="module")
def fast(libraries, demo_model):
    with LlamaProcess(libraries, demo_model) as worker:
        worker.ready = worker.start()
        assert isinstance(worker.ready, Ready), worker.ready
        yield worker


@pytest.fixture(scope="module")
def strict(libraries, demo_model):
    with LlamaProcess(libraries, demo_model) as worker:
        worker.ready = worker.start(profile="strict", context_tokens=512)
        assert isinstance(worker.ready, Ready), worker.ready
        yield worker


@pytest.fixture(scope="module")
def ask(vocabulary):
    def ask(question: str) -> list[int]:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return vocabulary.tokenize(text, parse_special=True)

    return ask


QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write a short story about a lighthouse keeper and his dog, with a storm in it.",
    "What is 2 + 2?",
    "List the days of the week.",
    "Explain why the sky is blue to a child, in simple words and without any numbers at all, please.",
    "Who wrote Hamlet?",
    "Say hello in Spanish.",
]


def test_ready_tells_what_was_loaded(fast):
    ready = fast.ready
    assert ready.engine.startswith("llama.cpp v0.5.0 (ggml 0.25")
    assert ready.vocabulary_tokens == 49152
    assert ready.context_trained_tokens == 8192
    assert ready.cells == 1024, "what was asked for; the cells of a probe lie beside them"
    # 1,024 cells and a probe's 32, rounded up to 256; layers, K and V, width, bytes of f16; told to 0.01 MiB.
    assert ready.kv_bytes == pytest.approx(1280 * 30 * 2 * 192 * 2, abs=0.01 * 2**20)
    assert ready.model_bytes is not None
    assert 90 << 20 < ready.model_bytes < 100 << 20
    assert len(ready.probe_tokens) == 4


def test_a_context_smaller_than_a_batch_serves(libraries, demo_model, ask):
    with LlamaProcess(libraries, demo_model) as worker:
        ready = worker.start(context_tokens=96, batch_tokens=512, slots=2)
        assert isinstance(ready, Ready), ready
        [result] = worker.run(submit(ask(QUESTIONS[5]), limit=8))
        assert result.ended.outcome == "completed"


def test_the_capital_of_france_is_paris(fast, ask):
    [result] = fast.run(submit(ask(QUESTIONS[0]), limit=40))
    assert "Paris" in result.only.text
    assert result.only.finish == "stop"
    assert result.ended.outcome == "completed"
    assert result.ended.prompt_ms > 0
    assert result.prefilled[-1] == len(ask(QUESTIONS[0]))


def test_the_output_limit_ends_with_length(fast, ask):
    [result] = fast.run(submit(ask(QUESTIONS[2]), limit=5))
    assert (len(result.only.tokens), result.only.finish) == (5, "length")


def test_ignoring_the_end_token_goes_on_to_the_limit(fast, ask):
    [result] = fast.run(submit(ask(QUESTIONS[0]), limit=40, ignore_eos=True))
    assert (len(result.only.tokens), result.only.finish) == (40, "length")


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(fast, ask):
    [whole] = fast.run(submit(ask(QUESTIONS[0]), limit=30))
    [cut] = fast.run(submit(ask(QUESTIONS[0]), limit=30, stop=["Paris"]))
    assert cut.only.finish == "stop"
    assert cut.only.text == whole.only.text[: whole.only.text.index("Paris")]


def test_eight_mixed_streams_equal_their_solo_runs_in_the_strict_profile(strict, ask):
    samplings = [GREEDY, SEEDED, PENALIZED, GREEDY, SEEDED, PENALIZED, GREEDY, SEEDED]
    orders = [(ask(q), 10 + 3 * i, s) for i, (q, s) in enumerate(zip(QUESTIONS, samplings, strict=True))]
    solo = [strict.run(submit(*order))[0].only for order in orders]
    together = [result.only for result in strict.run(*(submit(*order) for order in orders))]
    assert [a.tokens for a in together] == [a.tokens for a in solo]
    assert [a.text for a in together] == [a.text for a in solo]


def test_a_reused_slot_answers_as_a_fresh_one_in_the_strict_profile(libraries, demo_model, ask):
    order = submit(ask(QUESTIONS[5]), 12, SEEDED)
    with LlamaProcess(libraries, demo_model) as worker:
        worker.start(profile="strict", context_tokens=512, slots=1)
        [fresh] = worker.run(order)
        worker.run(submit(ask(QUESTIONS[2]), 30))
        [again] = worker.run(msgspec.structs.replace(order, attempt=2))
    assert again.only.tokens == fresh.only.tokens


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALIZED], ids=["greedy", "seeded", "penalized"])
def test_a_resumed_choice_goes_on_where_it_would_have(strict, ask, sampling):
    order = submit(ask(QUESTIONS[2]), 24, sampling)
    [whole] = strict.run(order)
    for cut in (1, 9, 23):
        before = whole.only.tokens[:cut]
        delivered = len(strict_text(strict, order, before).encode())
        [rest] = strict.run(
            msgspec.structs.replace(order, attempt=cut + 1, choices=[ChoiceStart(0, 24, before, delivered)])
        )
        assert before + rest.only.tokens == whole.only.tokens
        assert strict_text(strict, order, before) + rest.only.text == whole.only.text
        assert rest.only.finish == whole.only.finish


def strict_text(worker, order, tokens):
    """The text these tokens had given a client: from a run that ended by its limit there, without its tail."""
    from relevo.core.textfold import TextFold

    fold = TextFold(order.stop)
    return "".join(fold.feed(worker.vocabulary.piece(token)).text for token in tokens)


@pytest.fixture(autouse=True)
def _vocabulary_for_texts(strict, vocabulary):
    strict.vocabulary = vocabulary


def test_a_choice_that_had_ended_before_ends_at_once(fast, ask):
    order = submit(ask(QUESTIONS[0]), 40)
    [whole] = fast.run(order)
    [again] = fast.run(msgspec.structs.replace(order, attempt=2, choices=[ChoiceStart(0, 40, whole.only.tokens, 0)]))
    assert (again.only.tokens, again.only.text, again.only.finish) == ([], whole.only.text, "stop")
    assert again.ended.outcome == "completed"


def test_choices_share_the_prompt_and_differ_by_their_number(strict, ask):
    prompt = ask(QUESTIONS[2])
    [result] = strict.run(submit(prompt, choices=[ChoiceStart(i, 12) for i in range(3)], sampling=SEEDED))
    assert len({tuple(a.tokens) for a in result.answers.values()}) == 3
    assert result.prefilled[-1] == len(prompt)
    for index in range(3):
        [alone] = strict.run(submit(prompt, choices=[ChoiceStart(index, 12)], sampling=SEEDED))
        assert alone.answers[index].tokens == result.answers[index].tokens


def test_choices_resumed_at_different_points_each_go_on(strict, ask):
    order = submit(ask(QUESTIONS[2]), choices=[ChoiceStart(i, 16) for i in range(3)], sampling=SEEDED)
    [whole] = strict.run(order)
    cuts = {0: 7, 1: 0, 2: 16}
    choices = [ChoiceStart(i, 16, whole.answers[i].tokens[:cut]) for i, cut in cuts.items()]
    [rest] = strict.run(msgspec.structs.replace(order, attempt=2, choices=choices))
    for index, cut in cuts.items():
        assert rest.answers[index].tokens == whole.answers[index].tokens[cut:]
        assert rest.answers[index].text == whole.answers[index].text  # nothing of it was delivered
    assert rest.ended.outcome == "completed"


def test_the_fast_profile_gives_choices_the_same_shared_prompt(fast, ask):
    [result] = fast.run(submit(ask(QUESTIONS[2]), choices=[ChoiceStart(i, 12) for i in range(4)], sampling=SEEDED))
    assert len({tuple(a.tokens) for a in result.answers.values()}) == 4
    [greedy] = fast.run(submit(ask(QUESTIONS[0]), choices=[ChoiceStart(i, 12) for i in range(4)]))
    assert all("Paris" in a.text for a in greedy.answers.values())


def test_log_probabilities_are_given_for_the_drawn_token_and_the_best(fast, ask, vocabulary):
    [result] = fast.run(submit(ask(QUESTIONS[0]), limit=6, logprobs=5))
    assert [entry.token_id for entry in result.only.logprobs] == result.only.tokens
    for entry in result.only.logprobs:
        assert entry.logprob == entry.top[0][2] <= 0  # greedy: the drawn one is the best
        assert [p for _, _, p in entry.top] == sorted((p for _, _, p in entry.top), reverse=True)
        assert sum(math.exp(p) for _, _, p in entry.top) <= 1 + 1e-9
        assert entry.bytes_ == vocabulary.piece(entry.token_id, special=True)


def test_cancelling_ends_the_attempt_and_frees_its_cells(fast, ask):
    big = submit(ask(QUESTIONS[2]), limit=900, ignore_eos=True)
    seen = []

    def cancel_after_three(step: Step) -> None:
        seen.append(step)
        if len(seen) == 3:
            fast.frames.send(Cancel(big.request_id, 1))

    fast.frames.send(big)
    result = fast.collect([(big.request_id, 1)], cancel_after_three)[big.request_id, 1]
    assert result.ended.outcome == "cancelled"
    assert len(result.only.tokens) < 30
    [again] = fast.run(submit(ask(QUESTIONS[0]), limit=900))  # fits only if the cells came back
    assert again.ended.outcome == "completed"


def extended(worker, order, *, by: int, slowly: bool):
    """Run it in steps of so many tokens: each time in time, or only after it has paused."""
    [start] = order.choices
    held = by
    worker.frames.send(msgspec.structs.replace(order, choices=[msgspec.structs.replace(start, held_tokens=held)]))

    def extend(step: Step) -> None:
        nonlocal held
        [piece] = step.pieces
        assert piece.position <= held, "never further than it holds cells for"
        if piece.finish is None and piece.position == (held if slowly else held - 2):
            if slowly:
                worker.socket.settimeout(0.15)
                with pytest.raises(TimeoutError):
                    while True:  # heartbeats come, and nothing else
                        worker.frames.receive(Heartbeat)
                worker.socket.settimeout(None)
            held += by
            worker.frames.send(Extend(order.request_id, order.attempt, 0, held))

    return worker.collect([(order.request_id, order.attempt)], extend)[order.request_id, order.attempt].only


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALIZED], ids=["greedy", "seeded", "penalized"])
def test_an_answer_extended_step_by_step_equals_one_that_had_all_its_cells(strict, ask, sampling):
    order = submit(ask(QUESTIONS[2]), 24, sampling)
    [whole] = strict.run(order)
    for attempt, slowly in ((2, False), (3, True)):
        grown = extended(strict, msgspec.structs.replace(order, attempt=attempt), by=7, slowly=slowly)
        assert (grown.tokens, grown.text, grown.finish) == (whole.only.tokens, whole.only.text, whole.only.finish)


def test_a_pause_changes_nothing_for_one_sequence_in_the_fast_profile(fast, ask):
    order = submit(ask(QUESTIONS[2]), 24, SEEDED)
    [whole] = fast.run(order)
    grown = extended(fast, msgspec.structs.replace(order, attempt=2), by=5, slowly=True)
    assert (grown.tokens, grown.text) == (whole.only.tokens, whole.only.text)


def test_two_long_answers_share_a_pool_that_holds_one_of_them_whole(fast, ask):
    """The second pauses with its cells while the first goes on; when that has ended, it is given the rest."""
    prompt = (ask(QUESTIONS[5]) * 20)[:420]
    start, limit = 20, 100
    first, second = (submit(prompt, choices=[ChoiceStart(0, limit, held_tokens=start)], ignore_eos=True) for _ in "ab")
    assert 2 * len(prompt) + start + limit <= fast.ready.cells < 2 * (len(prompt) + limit)
    last: dict[str, int] = {}

    def extend(step: Step) -> None:
        for piece in step.pieces:
            last[piece.request_id] = piece.position
        if last == {first.request_id: start, second.request_id: start}:
            fast.frames.send(Extend(first.request_id, 1, 0, limit))
        elif any(p.request_id == first.request_id and p.finish for p in step.pieces):
            assert last[second.request_id] == start
            fast.frames.send(Extend(second.request_id, 1, 0, limit))

    fast.frames.send(first)
    fast.frames.send(second)
    results = fast.collect([(first.request_id, 1), (second.request_id, 1)], extend)
    for order in (first, second):
        result = results[order.request_id, 1]
        assert (len(result.only.tokens), result.only.finish, result.ended.outcome) == (limit, "length", "completed")


def test_cancelling_a_paused_answer_frees_its_cells(fast, ask):
    prompt = ask(QUESTIONS[2])
    order = submit(prompt, choices=[ChoiceStart(0, 900, held_tokens=4)], ignore_eos=True)
    fast.frames.send(order)

    def cancel(step: Step) -> None:
        if step.pieces[-1].position == 4:
            fast.frames.send(Cancel(order.request_id, 1))

    assert fast.collect([(order.request_id, 1)], cancel)[order.request_id, 1].ended.outcome == "cancelled"
    [again] = fast.run(submit(prompt, limit=fast.ready.cells - len(prompt), stop=["."]))
    assert again.ended.outcome == "completed"


def test_cancelling_what_has_ended_or_never_was_is_harmless(fast, ask):
    fast.frames.send(Cancel("nobody", 3))
    [result] = fast.run(submit(ask(QUESTIONS[0]), limit=3))
    fast.frames.send(Cancel(result.ended.request_id, 1))
    assert fast.run(submit(ask(QUESTIONS[0]), limit=3))[0].ended.outcome == "completed"


def test_a_probe_is_answered_beside_running_streams(fast, ask):
    order = submit(ask(QUESTIONS[2]), limit=20, ignore_eos=True)
    fast.frames.send(order)
    fast.frames.send(Probe(17))
    answer = None
    while answer is None:
        record = fast.receive()
        answer = record if isinstance(record, ProbeAnswer) else None
    assert (answer.number, answer.ok, answer.tokens) == (17, True, fast.ready.probe_tokens)
    fast.collect([(order.request_id, 1)])
