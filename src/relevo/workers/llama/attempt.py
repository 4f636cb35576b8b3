"""What the worker knows of one attempt and of each of its choices. No native code here."""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from relevo.core.events import ChoiceStart, Piece, Submit, TokenLogprob
from relevo.core.textfold import TextFold
from relevo.workers.llama.sampler import Leaders, NotFinite, Sampler, log_probabilities, wrong_with
from relevo.workers.llama.vocabulary import Vocabulary

CHOICES_MAX = 8
STOPS_MAX, STOP_CHARACTERS_MAX = 64, 4096
LOGPROBS_MAX = 100

Tokens = npt.NDArray[np.int32]


class RunState(enum.Enum):
    """Where a choice stands."""

    WAITING = "Its prompt is being read, or it waits for its own earlier output to be."
    DECODING = "A token was drawn and is to be decoded in the next step."
    PAUSED = "It has drawn all that it holds cells for; its last token is decoded when it is given more."
    ENDED = "It was given its finish; it holds no sequence any more."


class Reading:
    """Tokens to be read into a sequence from a position on, in chunks."""

    def __init__(self, tokens: Tokens, position: int, sequence: int, output: bool) -> None:
        self.tokens = tokens
        self.position = position  # of the first token
        self.sequence = sequence
        self.output = output  # are the logits after the last token wanted?
        self.done = 0

    @property
    def left(self) -> int:
        """Tokens not read yet."""
        return len(self.tokens) - self.done


class Run:
    """One choice: its sequence, its output so far, its text."""

    def __init__(self, submit: Submit, start: ChoiceStart, vocabulary: Vocabulary, leaders: Leaders) -> None:
        self.index = start.index
        self.state = RunState.WAITING
        self.sequence = -1
        self.cells = 0  # filled in its sequence
        self.output = list(start.output_tokens)
        self.earlier = len(self.output)  # tokens that an earlier attempt drew
        self._submit = submit
        self.held = start.max_output_tokens if start.held_tokens is None else start.held_tokens  # output tokens
        self._limit = start.max_output_tokens
        self._vocabulary = vocabulary
        self._leaders = leaders
        self._sampler = Sampler(submit.sampling, start.index, leaders)
        self._sampler.fold(submit.prompt_tokens)
        self._sampler.fold(self.output)
        self._fold = TextFold(submit.stop, start.delivered_bytes)
        self._unsent = "".join(self._fold.feed(vocabulary.piece(token)).text for token in self.output)

    def ended_before(self) -> Piece | None:
        """The earlier attempt had drawn everything already: the last piece. Else None."""
        if not self.output:
            return None
        finish = self._finish(self.output[-1])
        return self._piece([], "", finish, None) if finish else None

    def lacks(self, held_tokens: int) -> int:
        """Cells it has to be given before it holds cells for so many output tokens. None beyond its limit."""
        return max(0, min(held_tokens, self._limit) - self.held)

    def hold(self, more: int) -> None:
        """It was given so many cells: go on where it had paused."""
        self.held += more
        if self.state is RunState.PAUSED and len(self.output) < self.held:
            self.state = RunState.DECODING

    def draw(self, logits: npt.NDArray[np.float32]) -> Piece:
        """Draw the next token from the logits after all tokens so far. Raises NotFinite."""
        token = self._sampler.draw(logits, len(self.output))
        logprobs = None
        if self._submit.logprobs is not None:
            logprobs = [self._logprob(logits, token, self._submit.logprobs)]
        self._sampler.fold((token,))
        self.output.append(token)
        text = self._fold.feed(self._vocabulary.piece(token)).text
        self.state = RunState.DECODING if len(self.output) < self.held else RunState.PAUSED
        return self._piece([token], text, self._finish(token), logprobs)

    def _finish(self, last: int) -> str | None:
        if self._fold.stopped or (not self._submit.ignore_eos and self._vocabulary.is_eog(last)):
            return "stop"
        return "length" if len(self.output) >= self._limit else None

    def _piece(self, tokens: list[int], text: str, finish: str | None, logprobs: list[TokenLogprob] | None) -> Piece:
        text = self._unsent + text
        self._unsent = ""
        if finish is not None:
            text += self._fold.finish()
            self.state = RunState.ENDED
        s = self._submit
        return Piece(s.request_id, s.attempt, self.index, len(self.output), tokens, text, finish, logprobs)

    def _logprob(self, logits: npt.NDArray[np.float32], token: int, count: int) -> TokenLogprob:
        own, best = log_probabilities(logits, token, count, self._leaders)
        piece = self._vocabulary.piece
        return TokenLogprob(token, piece(token, special=True), own, [(t, piece(t, special=True), p) for t, p in best])


class Attempt:
    """One Submit that was taken on."""

    def __init__(self, submit: Submit, runs: list[Run], cells: int, now: float) -> None:
        self.key = (submit.request_id, submit.attempt)
        self.prompt: Tokens = np.array(submit.prompt_tokens, np.int32)
        self.runs = runs
        self.cells = cells  # taken from the pool; less with each choice that ends
        self.started = now
        self.decoding_since: float | None = None  # when the first token was drawn
        self.prompt_read = False

    @property
    def ended(self) -> bool:
        """Every choice has its finish."""
        return all(run.state is RunState.ENDED for run in self.runs)

    def times_ms(self, now: float) -> tuple[float, float]:
        """Time for the prompt and for the output."""
        first = self.decoding_since if self.decoding_since is not None else now
        return (first - self.started) * 1000, (now - first) * 1000


def cells_needed(submit: Submit, live: list[Run]) -> int:
    """Prompt once, and the output that each choice which has not ended may draw now."""
    return len(submit.prompt_tokens) + sum(run.held for run in live)


def refusal(submit: Submit, vocabulary_tokens: int) -> str | None:
    """One sentence about what native code must never see in this Submit, or None."""
    choices = submit.choices
    size = vocabulary_tokens
    rules: tuple[tuple[Callable[[], bool], str], ...] = (
        (lambda: len(submit.prompt_tokens) > 0, "The prompt has no tokens."),
        (lambda: _within(submit.prompt_tokens, size), "The prompt has a token that the vocabulary lacks."),
        (lambda: 1 <= len(choices) <= CHOICES_MAX, f"There must be between 1 and {CHOICES_MAX} choices."),
        (lambda: all(0 <= c.index < CHOICES_MAX for c in choices), f"Choices are numbered 0 to {CHOICES_MAX - 1}."),
        (lambda: len({c.index for c in choices}) == len(choices), "Two choices have the same number."),
        (lambda: all(1 <= c.max_output_tokens < 1 << 31 for c in choices), "The output limit must be at least 1."),
        (lambda: all(c.delivered_bytes >= 0 for c in choices), "The delivered byte offset must not be negative."),
        (lambda: all(len(c.output_tokens) <= c.max_output_tokens for c in choices), "There is output past its limit."),
        (lambda: all(_holds(c) for c in choices), "A choice must hold cells for more output than it has."),
        (lambda: all(_within(c.output_tokens, size) for c in choices), "The output has a token the vocabulary lacks."),
        (lambda: submit.logprobs is None or 0 <= submit.logprobs <= LOGPROBS_MAX, "Too many log probabilities."),
        (lambda: len(submit.stop) <= STOPS_MAX, f"There are more than {STOPS_MAX} stop strings."),
        (lambda: all(len(s) <= STOP_CHARACTERS_MAX for s in submit.stop), "A stop string is too long."),
    )
    wrong = next((sentence for holds, sentence in rules if not holds()), None)
    return wrong or wrong_with(submit.sampling, size)


def _holds(choice: ChoiceStart) -> bool:
    held = choice.held_tokens
    return held is None or len(choice.output_tokens) < held <= choice.max_output_tokens


def _within(tokens: list[int], vocabulary_tokens: int) -> bool:
    return not tokens or (min(tokens) >= 0 and max(tokens) < vocabulary_tokens)


__all__ = ["Attempt", "NotFinite", "Reading", "Run", "RunState", "cells_needed", "refusal"]
