"""Continuous batching: many attempts share the decode calls of one context.

A step is one decode call: a row for every choice that decodes, then prompt rows. While somebody decodes, prompt rows
are limited (`Pacer`) so that no stream pauses long; otherwise a step takes one micro-batch, so that a cancel or a new
arrival waits for no more than that. Prompts take turns, a chunk each: a short one never waits for a long one to end.

The gateway decides who runs and how far; the engine packs what it was given, and refuses (never aborts) what does not
fit. A choice that has drawn all it holds cells for has no row in a step until it is given more: that costs nothing, and
changes nothing of what it draws, because its token and its random number depend on its position alone.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np

from relevo.core.events import AttemptEnded, Cancel, Extend, Piece, Prefilled, Probe, ProbeAnswer, Step, Submit
from relevo.workers.llama.attempt import Attempt, NotFinite, Reading, Run, RunState, cells_needed, refusal
from relevo.workers.llama.model import Model, ProbeFault
from relevo.workers.llama.pacer import Pacer
from relevo.workers.llama.sampler import Leaders

NO_CELLS, OUT_OF_MEMORY = 1, -2


class EngineLost(Exception):
    """The context can't be trusted any more; the process has to end."""


class Engine:
    """All attempts of one worker. One thread calls it; `emit` takes every record it sends."""

    def __init__(self, model: Model, prefill_chunk_tokens: int, emit: Callable[[Any], None]) -> None:
        self._model = model
        self._emit = emit
        self._leaders = Leaders(model.vocabulary_tokens)
        self._pacer = Pacer(prefill_chunk_tokens)
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._readings: deque[tuple[Attempt, Reading]] = deque()
        self._free_sequences = list(range(model.slots))  # a heap: the lowest is taken first (see `_pack`)
        self._free_cells = model.cells
        self._probes: deque[Probe] = deque()
        self._known_answer: list[int] = []
        self.steps = 0
        self.step_began: float | None = None  # monotonic; None between steps

    @property
    def running(self) -> int:
        """Attempts that hold something."""
        return len(self._attempts)

    @property
    def busy(self) -> bool:
        """Is there a step to be done? Not where everybody is paused."""
        if self._readings or (self._probes and self._probe_sequence is not None):
            return True
        return any(run.state is RunState.DECODING for a in self._attempts.values() for run in a.runs)

    @property
    def _probe_sequence(self) -> int | None:
        """Where a probe may run now: beside the offered ones (fast), or in a free one."""
        if self._model.scratch_sequence is not None:
            return self._model.scratch_sequence
        return self._free_sequences[-1] if self._free_sequences else None

    # ------------------------------------------------------------------ orders

    def prove(self) -> list[int]:
        """The first probe; later ones must give the same answer. Raises ProbeFault."""
        sequence = self._model.scratch_sequence
        self._known_answer = self._model.probe(4, 0 if sequence is None else sequence)
        return self._known_answer

    def submit(self, submit: Submit) -> None:
        """Take an attempt on, or answer at once that it has failed. One that runs already is left alone."""
        if (submit.request_id, submit.attempt) in self._attempts:
            print(f"Attempt {submit.attempt} of {submit.request_id} runs already; ignored.", file=sys.stderr)
            return
        wrong = refusal(submit, self._model.vocabulary_tokens)
        if wrong is not None:
            self._refuse(submit, "invalid", wrong)
            return
        try:
            runs = [Run(submit, choice, self._model.vocabulary, self._leaders) for choice in submit.choices]
        except ValueError as e:
            self._refuse(submit, "invalid", str(e))
            return
        ended = [piece for run in runs if (piece := run.ended_before()) is not None]
        live = [run for run in runs if run.state is not RunState.ENDED]
        if live and (lack := self._lack(submit, live)) is not None:
            self._refuse(submit, "no_cells", lack)
            return
        cells = cells_needed(submit, live) if live and not self._model.strict else 0
        attempt = Attempt(submit, runs, cells, time.monotonic())
        self._attempts[attempt.key] = attempt
        self._free_cells -= attempt.cells
        if ended:
            self._emit(Step(ended))
        if not live:
            self._end(attempt, "completed")
            return
        for run in live:
            run.sequence = heapq.heappop(self._free_sequences)
        self._read_prompt(attempt)

    def extend(self, extend: Extend) -> None:
        """Let a choice draw further. One that has ended needs nothing.

        Where there are not so many cells, somebody has counted wrong, and the attempt fails rather than wait for ever.
        """
        attempt = self._attempts.get((extend.request_id, extend.attempt))
        runs = attempt.runs if attempt is not None else []
        run = next((run for run in runs if run.index == extend.choice and run.state is not RunState.ENDED), None)
        if attempt is None or run is None:
            return
        more = run.lacks(extend.held_tokens)
        if not self._model.strict:
            if more > self._free_cells:
                lack = f"{more} more cells are needed and {self._free_cells} are free."
                self._end(attempt, "failed", "no_cells", lack)
                return
            attempt.cells += more
            self._free_cells -= more
        run.hold(more)

    def cancel(self, cancel: Cancel) -> None:
        """End an attempt now. One that has ended already was answered already."""
        attempt = self._attempts.get((cancel.request_id, cancel.attempt))
        if attempt is not None:
            self._end(attempt, "cancelled")

    def probe(self, probe: Probe) -> None:
        """Probe at the next step; in the strict profile when a sequence is free."""
        self._probes.append(probe)

    def end_all(self) -> None:
        """Every attempt ends as cancelled."""
        for attempt in list(self._attempts.values()):
            self._end(attempt, "cancelled")

    # -------------------------------------------------------------------- steps

    def step(self) -> None:
        """One decode call with what there is to do. Raises EngineLost."""
        self.step_began = time.monotonic()
        try:
            self._answer_probes()
            decoding, chunks = self._pack()
            if not self._model.rows.count:
                return
            code = self._model.decode()
            took_ms = (time.monotonic() - self.step_began) * 1000
            self.steps += 1
            if code != 0:
                self._failed(code)
                return
            prompt_rows = sum(count for _, _, count, _ in chunks)
            self._pacer.observe(len(decoding), prompt_rows, took_ms)
            self._take_in(decoding, chunks)
        finally:
            self.step_began = None

    def _pack(self) -> tuple[list[tuple[Attempt, Run, int]], list[tuple[Attempt, Reading, int, int]]]:
        """Fill the rows: every decoding choice, then chunks of prompts in turn.

        Decoding rows go by sequence: where each has a cache of its own, the engine computes only sequences that
        follow one another together, and any other order costs it another pass over the weights.
        """
        rows = self._model.rows
        rows.clear()
        ready = [
            (run.sequence, attempt, run)
            for attempt in self._attempts.values()
            for run in attempt.runs
            if run.state is RunState.DECODING
        ]
        ready.sort(key=itemgetter(0))
        decoding = []
        for sequence, attempt, run in ready:
            row = rows.add(run.output[-1:], run.cells, sequence, output=True)
            decoding.append((attempt, run, row))
        budget = self._pacer.rows() if decoding else self._model.ubatch_tokens
        budget = min(budget, rows.capacity - rows.count)
        chunks = []
        for attempt, reading in list(self._readings):
            count = min(budget, reading.left)
            if not count:
                break
            budget -= count
            output = reading.output and count == reading.left
            part = reading.tokens[reading.done : reading.done + count]
            row = rows.add(part, reading.position + reading.done, reading.sequence, output)
            chunks.append((attempt, reading, count, row))
        self._readings.rotate(-1)
        return decoding, chunks

    def _take_in(
        self, decoding: list[tuple[Attempt, Run, int]], chunks: list[tuple[Attempt, Reading, int, int]]
    ) -> None:
        """The rows were computed: draw tokens, advance prompts, send one Step frame, end what has ended."""
        pieces: list[Piece] = []
        for attempt, run, row in decoding:
            run.cells += 1
            self._draw(attempt, [run], row, pieces)
        for attempt, reading, count, row in chunks:
            if attempt.key not in self._attempts:
                continue  # another choice of it has just failed
            reading.done += count
            if reading.position == 0:
                self._emit(Prefilled(*attempt.key, reading.done, len(attempt.prompt)))
            if reading.left == 0:
                self._readings.remove((attempt, reading))
                self._reading_done(attempt, reading, row, pieces)
        if pieces:
            self._emit(Step(pieces))
        for key in dict.fromkeys((piece.request_id, piece.attempt) for piece in pieces):
            finished = self._attempts.get(key)
            if finished is not None and finished.ended:
                self._end(finished, "completed")

    def _draw(self, attempt: Attempt, runs: list[Run], row: int, pieces: list[Piece]) -> None:
        """Each of these choices draws its next token from the logits of this row."""
        if attempt.key not in self._attempts:
            return  # another choice of it has just failed
        logits = self._model.logits(row)
        if logits is None:
            self._end(attempt, "failed", "engine", "The engine gave no logits for a row that asked for them.")
            return
        for run in runs:
            try:
                pieces.append(run.draw(logits))
            except (NotFinite, ValueError) as e:
                pieces[:] = [p for p in pieces if (p.request_id, p.attempt) != attempt.key]
                if isinstance(e, NotFinite):
                    self._end(attempt, "failed", "nan", "The model's output is not finite numbers.")
                else:
                    self._end(attempt, "failed", "invalid", str(e))
                return
            if attempt.decoding_since is None:
                attempt.decoding_since = time.monotonic()
            if run.state is RunState.ENDED:
                self._release(attempt, run)

    # ------------------------------------------------------------------ prompts

    def _read_prompt(self, attempt: Attempt) -> None:
        """The prompt is read once, into the first choice's sequence."""
        first = next(run for run in attempt.runs if run.sequence >= 0)
        wanted = any(not run.earlier for run in attempt.runs)
        self._readings.append((attempt, Reading(attempt.prompt, 0, first.sequence, wanted)))

    def _reading_done(self, attempt: Attempt, reading: Reading, row: int, pieces: list[Piece]) -> None:
        if attempt.prompt_read:
            run = next(run for run in attempt.runs if run.sequence == reading.sequence)
            run.cells = reading.position + len(reading.tokens)
            self._draw(attempt, [run], row, pieces)
            return
        attempt.prompt_read = True
        live = [run for run in attempt.runs if run.sequence >= 0]
        for run in live:
            run.cells = len(attempt.prompt)
            if run.sequence != reading.sequence:
                self._model.copy_sequence(reading.sequence, run.sequence)
        for run in live:
            if run.earlier:
                earlier = Reading(np.array(run.output, np.int32), run.cells, run.sequence, output=True)
                self._readings.append((attempt, earlier))
        fresh = [run for run in live if not run.earlier]
        if fresh:
            self._draw(attempt, fresh, row, pieces)

    # --------------------------------------------------------------------- ends

    def _lack(self, submit: Submit, live: list[Run]) -> str | None:
        """What this attempt, with these choices not ended yet, needs beyond what is free: a sentence, or None."""
        if len(live) > len(self._free_sequences):
            return f"{len(live)} slots are needed and {len(self._free_sequences)} are free."
        if self._model.strict:
            need = len(submit.prompt_tokens) + max(c.max_output_tokens for c in submit.choices)
            free = self._model.cells
        else:
            need, free = cells_needed(submit, live), self._free_cells
        return f"{need} cells are needed and {free} are free." if need > free else None

    def _refuse(self, submit: Submit, code: str, message: str) -> None:
        self._emit(AttemptEnded(submit.request_id, submit.attempt, "failed", code, message))

    def _release(self, attempt: Attempt, run: Run) -> None:
        """Free the sequence of a choice, everything in it, and the cells for its output."""
        if run.sequence >= 0:
            self._model.remove_sequence(run.sequence)
            heapq.heappush(self._free_sequences, run.sequence)
            run.sequence = -1
            if not self._model.strict:
                attempt.cells -= run.held
                self._free_cells += run.held

    def _end(self, attempt: Attempt, outcome: str, code: str | None = None, message: str | None = None) -> None:
        """The attempt holds nothing any more, and is told so."""
        del self._attempts[attempt.key]
        self._readings = deque(entry for entry in self._readings if entry[0] is not attempt)
        for run in attempt.runs:
            self._release(attempt, run)
        self._free_cells += attempt.cells
        prompt_ms, decode_ms = attempt.times_ms(time.monotonic())
        self._emit(AttemptEnded(*attempt.key, outcome, code, message, prompt_ms, decode_ms))

    def _failed(self, code: int) -> None:
        """A decode call failed. 1: the youngest attempt makes room. Else nothing in the cache is believed any more."""
        if code == NO_CELLS:
            youngest = list(self._attempts.values())[-1]
            self._end(youngest, "failed", "no_cells", "The engine found no free cells for this step.")
            return
        why = "ran out of memory" if code == OUT_OF_MEMORY else f"answered {code}"
        print(f"llama_decode {why} with {self._model.rows.count} rows.", file=sys.stderr, flush=True)
        if code > 0 or code < OUT_OF_MEMORY:
            raise EngineLost(f"llama_decode answered {code}: computation failed.")
        for attempt in list(self._attempts.values()):
            self._end(attempt, "failed", "engine", f"The engine {why} during a step.")
        self._model.clear()
        try:
            answer = self._model.probe(len(self._known_answer), self._model.scratch_sequence or 0)
        except ProbeFault as e:
            raise EngineLost(f"After a failed step the probe failed too. {e}") from None
        if answer != self._known_answer:
            raise EngineLost("After a failed step the probe gave another answer than at the start.")

    def _answer_probes(self) -> None:
        while self._probes:
            sequence = self._probe_sequence
            if sequence is None:
                return
            probe = self._probes.popleft()
            began = time.monotonic()
            tokens: list[int] = []
            fault = None
            try:
                tokens = self._model.probe(max(1, probe.tokens), sequence)
            except ProbeFault as e:
                fault = str(e)
            took_ms = (time.monotonic() - began) * 1000
            self._emit(ProbeAnswer(probe.number, fault is None, tokens, took_ms, fault))
