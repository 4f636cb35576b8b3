"""The engine's decisions, with a model whose decode calls answer what a test says: faults, turns, cells, pauses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from relevo.core.events import (
    AttemptEnded,
    Cancel,
    ChoiceStart,
    Extend,
    Prefilled,
    Probe,
    ProbeAnswer,
    Sampling,
    Step,
    Submit,
)
from relevo.workers.llama.engine import Engine, EngineLost
from relevo.workers.llama.model import ProbeFault
from relevo.workers.llama.pacer import TARGET_STEP_MS, Pacer

VOCABULARY = 128
END = 2


class Rows:
    def __init__(self, capacity):
        self.capacity = capacity
        self.clear()

    def clear(self):
        self.parts = []
        self.count = 0

    def add(self, tokens, position, sequence, output):
        self.parts.append((list(tokens), position, sequence, output))
        self.count += len(tokens)
        assert self.count <= self.capacity
        return self.count - 1


class Vocabulary:
    def piece(self, token, special=False):
        return b"" if token == END else bytes([97 + token % 26])

    def is_eog(self, token):
        return token == END


class CountingModel:
    """Its next token is always the last one of the row plus one. Checks positions as the real one would."""

    def __init__(self, slots=4, cells=100, strict=False):
        self.vocabulary_tokens = VOCABULARY
        self.vocabulary = Vocabulary()
        self.strict, self.slots, self.cells = strict, slots, cells
        self.scratch_sequence = None if strict else slots
        self.rows = Rows(64)
        self.ubatch_tokens = 16
        self.filled = {}
        self.codes = []
        self.calls = []
        self.poison = None  # a token after which logits are no numbers
        self.probe_answer = [1, 2, 3, 4]

    def decode(self):
        code = self.codes.pop(0) if self.codes else 0
        self.calls.append(list(self.rows.parts))
        if code == 0:
            self.last = {}
            row = -1
            for tokens, position, sequence, output in self.rows.parts:
                assert position == self.filled.get(sequence, 0), "no gap and no overlap"
                self.filled[sequence] = position + len(tokens)
                row += len(tokens)
                if output:
                    self.last[row] = tokens[-1]
        return code

    def logits(self, row):
        token = self.last[row]
        logits = np.zeros(VOCABULARY, np.float32)
        logits[(token + 1) % VOCABULARY] = math.nan if token == self.poison else 9
        return logits

    def copy_sequence(self, source, target):
        assert self.filled.get(target, 0) == 0
        self.filled[target] = self.filled[source]

    def remove_sequence(self, sequence):
        self.filled.pop(sequence, None)

    def clear(self):
        self.filled.clear()

    def probe(self, tokens, sequence):
        assert sequence not in self.filled
        if self.probe_answer is None:
            raise ProbeFault("No.")
        return self.probe_answer[:tokens]


class House:
    def __init__(self, **changes):
        self.model = CountingModel(**changes)
        self.sent = []
        self.engine = Engine(self.model, 64, self.sent.append)
        self.engine.prove()

    def submit(self, name, prompt, limit=5, choices=None, **more):
        choices = choices or [ChoiceStart(0, limit)]
        self.engine.submit(Submit(name, 1, prompt, choices, Sampling(temperature=0), **more))

    def finish(self):
        steps = 0
        while self.engine.busy:
            self.engine.step()
            steps += 1
            assert steps < 500

    def tokens(self, name, choice=0):
        pieces = [p for r in self.sent if isinstance(r, Step) for p in r.pieces]
        return [t for p in pieces if (p.request_id, p.choice) == (name, choice) for t in p.tokens]

    def end(self, name):
        [ended] = [r for r in self.sent if isinstance(r, AttemptEnded) and r.request_id == name]
        return ended.outcome, ended.code


def test_an_attempt_runs_to_its_limit_and_gives_everything_back():
    house = House()
    house.submit("a", [10, 11, 12])
    house.finish()
    assert house.tokens("a") == [13, 14, 15, 16, 17]
    assert house.end("a") == ("completed", None)
    assert house.model.filled == {}
    house.submit("b", [5] * 95, limit=5)
    house.finish()
    assert house.end("b") == ("completed", None)


def test_a_choice_that_has_drawn_what_it_holds_pauses_until_it_is_extended():
    house = House()
    house.submit("a", [10], choices=[ChoiceStart(0, 8, held_tokens=3)])
    house.finish()
    assert house.tokens("a") == [11, 12, 13]
    assert not house.engine.busy, "nobody computes while everybody is paused"
    assert house.engine.running == 1
    steps = len(house.model.calls)
    house.engine.extend(Extend("a", 1, 0, 5))
    house.finish()
    assert house.tokens("a") == [11, 12, 13, 14, 15]
    assert len(house.model.calls) == steps + 2, "the pause cost no step"
    house.engine.extend(Extend("a", 1, 0, 99))
    house.finish()
    assert house.tokens("a") == [11, 12, 13, 14, 15, 16, 17, 18], "an extension never lifts the limit"
    assert house.end("a") == ("completed", None)


def test_an_extension_that_comes_in_time_is_not_felt():
    house = House()
    house.submit("a", [10], choices=[ChoiceStart(0, 6, held_tokens=2)])
    house.engine.step()
    house.engine.extend(Extend("a", 1, 0, 6))
    house.finish()
    assert house.tokens("a") == [11, 12, 13, 14, 15, 16]
    assert len(house.model.calls) == 6


def test_a_paused_choice_does_not_stop_its_neighbours():
    house = House()
    house.submit("a", [10], choices=[ChoiceStart(0, 9, held_tokens=2), ChoiceStart(1, 9, held_tokens=4)])
    house.submit("b", [30], limit=6)
    house.finish()
    assert (house.tokens("a", 0), house.tokens("a", 1)) == ([11, 12], [11, 12, 13, 14])
    assert house.end("b") == ("completed", None)
    assert all(len(tokens) == 1 for call in house.model.calls[1:] for tokens, *_ in call)


def test_only_what_is_held_is_taken_from_the_pool():
    house = House(cells=100)
    house.submit("a", [10] * 40, choices=[ChoiceStart(0, 60, held_tokens=10)])
    house.submit("b", [50] * 40, choices=[ChoiceStart(0, 60, held_tokens=10)])
    house.submit("c", [1], limit=1)
    assert house.end("c") == ("failed", "no_cells")
    house.finish()
    assert (len(house.tokens("a")), len(house.tokens("b"))) == (10, 10)
    house.engine.cancel(Cancel("b", 1))
    house.engine.extend(Extend("a", 1, 0, 60))
    house.finish()
    assert len(house.tokens("a")) == 60
    assert house.end("a") == ("completed", None)


def test_a_choice_that_ends_gives_its_cells_and_its_sequence_back_before_its_neighbours_end():
    house = House(cells=40, slots=3)
    house.submit("a", [10] * 10, choices=[ChoiceStart(0, 2), ChoiceStart(1, 20, held_tokens=18)])
    house.finish()
    house.submit("b", [30], limit=11)
    house.finish()
    assert house.end("b") == ("completed", None)
    house.engine.extend(Extend("a", 1, 1, 20))
    house.finish()
    assert house.end("a") == ("completed", None)
    house.submit("c", [30] * 30, limit=10)
    house.finish()
    assert house.end("c") == ("completed", None), "nothing was lost on the way"


def test_an_extension_beyond_the_pool_fails_its_attempt_rather_than_let_it_wait_for_ever():
    house = House(cells=50)
    house.submit("a", [10] * 20, choices=[ChoiceStart(0, 60, held_tokens=5)])
    house.finish()
    house.engine.extend(Extend("a", 1, 0, 31))
    assert house.end("a") == ("failed", "no_cells")
    assert house.model.filled == {}


def test_extending_what_has_ended_or_never_was_is_harmless():
    house = House()
    house.submit("a", [10], limit=2)
    house.finish()
    for stale in (Extend("a", 1, 0, 9), Extend("nobody", 1, 0, 9), Extend("a", 2, 0, 9), Extend("a", 1, 7, 9)):
        house.engine.extend(stale)
    house.submit("b", [10] * 95, limit=5)
    house.finish()
    assert house.end("b") == ("completed", None)


def test_an_extension_to_less_than_is_held_changes_nothing():
    house = House()
    house.submit("a", [10], choices=[ChoiceStart(0, 9, held_tokens=5)])
    house.engine.extend(Extend("a", 1, 0, 2))
    house.finish()
    assert len(house.tokens("a")) == 5


@pytest.mark.parametrize("held", [0, 2, 10], ids=["nothing", "no more than it has", "more than its limit"])
def test_a_choice_must_hold_more_than_it_has_and_no_more_than_its_limit(held):
    house = House()
    house.submit("a", [10], choices=[ChoiceStart(0, 9, [11, 12], held_tokens=held)])
    assert house.end("a") == ("failed", "invalid")


def test_a_paused_attempt_can_be_cancelled():
    house = House()
    house.submit("a", [10], choices=[ChoiceStart(0, 9, held_tokens=2)])
    house.finish()
    house.engine.cancel(Cancel("a", 1))
    assert house.end("a") == ("cancelled", None)
    assert house.model.filled == {}


def test_a_strict_probe_does_not_keep_the_worker_awake_while_every_sequence_is_paused():
    house = House(slots=1, strict=True)
    house.submit("a", [10], choices=[ChoiceStart(0, 4, held_tokens=2)])
    house.engine.probe(Probe(3))
    house.finish()
    assert house.tokens("a") == [11, 12]
    house.engine.extend(Extend("a", 1, 0, 4))
    house.finish()
    assert [type(r) for r in house.sent][-1] is ProbeAnswer


def test_the_end_token_counts_and_ends():
    house = House()
    house.submit("a", [0], limit=9)
    house.finish()
    assert house.tokens("a") == [1, END]
    pieces = [p for r in house.sent if isinstance(r, Step) for p in r.pieces]
    assert [(p.position, p.finish) for p in pieces] == [(1, None), (2, "stop")]


def test_prompts_take_turns_so_that_a_short_one_does_not_wait_for_a_long_one():
    house = House(cells=400)
    house.submit("long", [9] * 200, limit=2)
    house.engine.step()
    house.submit("short", [20, 21], limit=2)
    for _ in range(3):
        house.engine.step()
    assert house.tokens("short")
    assert not house.tokens("long")
    house.finish()
    assert house.tokens("long") == [10, 11]


def test_without_decoding_streams_a_step_is_one_micro_batch():
    house = House(cells=400)
    house.submit("long", [9] * 100)
    house.engine.step()
    assert [len(tokens) for tokens, *_ in house.model.calls[-1]] == [16]
    assert house.sent == [Prefilled("long", 1, 16, 100)]


def test_the_youngest_attempt_makes_room_when_the_engine_finds_no_cells():
    house = House()
    house.submit("old", [10])
    house.submit("young", [30])
    house.model.codes = [1]
    house.finish()
    assert house.end("young") == ("failed", "no_cells")
    assert house.end("old") == ("completed", None)
    assert house.tokens("old") == [11, 12, 13, 14, 15]


@pytest.mark.parametrize("code", [-1, -2])
def test_after_a_failed_step_everybody_ends_and_the_worker_serves_again_once_proven(code):
    house = House()
    house.submit("a", [10])
    house.submit("b", [20])
    house.engine.step()
    house.model.codes = [code]
    house.engine.step()
    assert house.end("a") == house.end("b") == ("failed", "engine")
    house.submit("c", [40])
    house.finish()
    assert house.end("c") == ("completed", None)


@pytest.mark.parametrize("answer", [None, [1, 2, 3, 5]], ids=["fails", "differs"])
def test_a_worker_that_cannot_prove_itself_after_a_fault_is_lost(answer):
    house = House()
    house.submit("a", [10])
    house.model.codes = [-2]
    house.model.probe_answer = answer
    with pytest.raises(EngineLost):
        house.engine.step()
    assert house.end("a") == ("failed", "engine")


@pytest.mark.parametrize("code", [2, -3, -7])
def test_a_fatal_code_loses_the_worker_at_once(code):
    house = House()
    house.submit("a", [10])
    house.model.codes = [code]
    with pytest.raises(EngineLost):
        house.engine.step()


def test_logits_that_are_no_numbers_end_only_their_attempt():
    house = House()
    house.submit("good", [10])
    house.submit("bad", [30], choices=[ChoiceStart(0, 5), ChoiceStart(1, 5)])
    house.model.poison = 32
    house.finish()
    assert house.end("bad") == ("failed", "nan")
    assert house.end("good") == ("completed", None)
    assert house.tokens("bad") == [31, 32]
    assert house.model.filled == {}


def test_a_prompt_that_gives_no_numbers_ends_before_its_first_token():
    house = House()
    house.model.poison = 30
    house.submit("bad", [30], choices=[ChoiceStart(0, 5), ChoiceStart(1, 5)])
    house.finish()
    assert house.end("bad") == ("failed", "nan")
    assert house.tokens("bad") == []


def test_cancelling_in_the_middle_of_a_prompt_frees_it():
    house = House(cells=400)
    house.submit("long", [9] * 300)
    house.engine.step()
    house.engine.cancel(Cancel("long", 1))
    assert house.end("long") == ("cancelled", None)
    assert not house.engine.busy
    assert house.model.filled == {}


def test_an_offset_inside_a_character_is_refused_when_it_is_known():
    house = House()
    house.submit("a", [10], choices=[ChoiceStart(0, 5, [], 3)])
    house.finish()
    assert house.end("a") == ("completed", None)
    text = "".join(p.text for r in house.sent if isinstance(r, Step) for p in r.pieces)
    assert text == "".join(chr(97 + t % 26) for t in house.tokens("a"))[3:]


def test_a_strict_probe_waits_for_a_free_sequence():
    house = House(slots=1, strict=True)
    house.submit("a", [10], limit=3)
    house.engine.step()
    house.engine.probe(Probe(5))
    house.finish()
    kinds = [type(r) for r in house.sent]
    assert kinds.index(ProbeAnswer) > kinds.index(AttemptEnded)


def test_an_attempt_sent_twice_runs_once():
    house = House()
    house.submit("a", [10])
    house.submit("a", [10])
    house.finish()
    assert house.tokens("a") == [11, 12, 13, 14, 15]
    assert house.end("a") == ("completed", None)


def test_the_pacer_finds_a_chunk_that_keeps_a_step_near_its_target():
    pacer = Pacer(rows_max=512)
    for row_ms in (0.5, 2.0, 6.0, 17.0):
        for _ in range(12):
            rows = pacer.rows()
            pacer.observe(4, 0, 20.0)
            pacer.observe(4, rows, 20.0 + rows * row_ms)
        took_ms = 20.0 + pacer.rows() * row_ms
        assert took_ms <= max(TARGET_STEP_MS + 1, 20 + 16 * row_ms)
        assert took_ms >= TARGET_STEP_MS * 0.6


def test_the_pacer_never_goes_past_its_cap_nor_below_a_few_rows():
    pacer = Pacer(rows_max=32)
    for _ in range(20):
        pacer.observe(1, 32, 1.0)
    assert pacer.rows() == 32
    for _ in range(20):
        pacer.observe(1, 16, 9000.0)
    assert pacer.rows() == 16
