"""Text state as a pure fold over the bytes of output tokens.

The same tokens always fold to the same text, however they were cut into pieces, so the state is never
shipped: a worker that takes over feeds all output tokens again and names the bytes the client already has.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

import msgspec


class FoldResult(msgspec.Struct, frozen=True):
    """What one piece released. Once `stopped` is True no more text ever comes."""

    text: str
    stopped: bool


class _StopStrings:
    """All stop strings as one automaton (Aho and Corasick, 1975): one step a character, whatever their number.

    A state is the longest end of the text that some stop string begins with. Its depth is what must be held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [0]
        self.depth: list[int] = [0]
        self.matched: list[int] = [0]  # characters of the longest stop string that ends in this state, 0 if none
        for string in stop:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.matched.append(0)
            state = following
        self.matched[state] = len(string)

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            if not self.matched[state]:
                self.matched[state] = self.matched[self._fallback[state]]
            for character, following in self._next[state].items():
                self._fallback[following] = self.step(self._fallback[state], character)
                waiting.append(following)

    def step(self, state: int, character: str) -> int:
        """The state after one more character. Amortised constant time over a text."""
        following = self._next[state].get(character)
        while following is None and state:
            state = self._fallback[state]
            following = self._next[state].get(character)
        return following or 0


class TextFold:
    """Folds token bytes into text: whole characters only, never any part of a stop string.

    The first stop string to become complete wins; of those that end at the same character, the longest, so that
    nothing of any of them is given out. Invalid UTF-8 becomes U+FFFD as `bytes.decode(errors="replace")` has it.
    `delivered_bytes` are UTF-8 bytes of text (not of tokens) that the client already has; the fold gives out only
    what lies past them. Cost is linear in the bytes fed.

    Raises ValueError for an empty stop string, one that is not valid Unicode, or a negative offset.
    """

    def __init__(self, stop: Sequence[str] = (), delivered_bytes: int = 0) -> None:
        if isinstance(stop, str):
            raise ValueError("Stop strings must be a list, not a single string.")
        for string in stop:
            if not string:
                raise ValueError("A stop string must not be empty.")
            if any("\ud800" <= character <= "\udfff" for character in string):
                raise ValueError("A stop string must be valid Unicode, without lone surrogates.")
        if delivered_bytes < 0:
            raise ValueError("The delivered byte offset must not be negative.")
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = _StopStrings(stop) if stop else None
        self._state = 0
        self._held = ""
        self._released_bytes = 0
        self._delivered_bytes = delivered_bytes
        self._stopped = False
        self._finished = False

    @property
    def stopped(self) -> bool:
        """A stop string was completed."""
        return self._stopped

    @property
    def emitted_bytes(self) -> int:
        """UTF-8 bytes of text given out so far, those of earlier attempts (`delivered_bytes`) included."""
        return max(self._released_bytes, self._delivered_bytes)

    @property
    def missing_bytes(self) -> int:
        """Bytes the client has that the tokens fed so far do not account for. 0 once a replay has caught up."""
        return max(0, self._delivered_bytes - self._released_bytes)

    def feed(self, piece: bytes) -> FoldResult:
        """Add one token's bytes. After a stop string, pieces are ignored.

        Raises ValueError after `finish`, or where the delivered offset cuts a character in two.
        """
        if self._finished:
            raise ValueError("This text is finished; nothing can follow.")
        if self._stopped:
            return FoldResult("", True)
        return FoldResult(self._past_delivered(self._match(self._decoder.decode(piece))), self._stopped)

    def finish(self) -> str:
        """The output has ended: everything held back, half a character as U+FFFD. Empty after a stop string."""
        if self._finished or self._stopped:
            self._finished = True
            return ""
        self._finished = True
        released = self._match(self._decoder.decode(b"", final=True))
        if not self._stopped:
            released += self._held
            self._held = ""
        return self._past_delivered(released)

    def _match(self, text: str) -> str:
        """Run the automaton over new characters; return what is safe to give out."""
        stops = self._stops
        if stops is None:
            return text
        state = self._state
        for index, character in enumerate(text):
            state = stops.step(state, character)
            if stops.matched[state]:
                known = self._held + text[: index + 1]
                self._stopped = True
                self._held = ""
                return known[: len(known) - stops.matched[state]]
        self._state = state
        known = self._held + text
        safe = len(known) - stops.depth[state]
        self._held = known[safe:]
        return known[:safe]

    def _past_delivered(self, text: str) -> str:
        missing = self.missing_bytes
        encoded = text.encode()
        self._released_bytes += len(encoded)
        if not missing:
            return text
        try:
            return encoded[missing:].decode()
        except UnicodeDecodeError:
            raise ValueError("The delivered byte offset lies inside a character.") from None
