"""The text fold: any cut of the same bytes is the same text, and no stop string ever leaks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relevo.core.textfold import TextFold

# Few letters, so that stop strings really occur; characters of 1 to 4 bytes; bytes that are no UTF-8 at all.
ALPHABET = "abé€😀\n"
texts = st.text(ALPHABET, max_size=40).map(str.encode)
broken = st.lists(
    st.one_of(texts, st.sampled_from([b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\x80"])),
    max_size=6,
).map(b"".join)
stops = st.lists(st.text(ALPHABET + "�", min_size=1, max_size=5), max_size=4)


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = [0, *sorted(point % (len(data) + 1) for point in points), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def fold(pieces: list[bytes], stop: list[str], delivered_bytes: int = 0) -> tuple[list[str], bool, TextFold]:
    state = TextFold(stop, delivered_bytes)
    out = []
    for piece in pieces:
        result = state.feed(piece)
        out.append(result.text)
        if result.stopped:
            break
    out.append(state.finish())
    return out, state.stopped, state


def slow_truth(data: bytes, stop: list[str]) -> tuple[str, bool]:
    """The same rule, written the slow and obvious way: grow the text until it ends with a stop string."""
    text = data.decode(errors="replace")
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(broken, stops, st.lists(st.integers(0, 200), max_size=12))
@example(b"ababc", ["abc"], [2, 3])
@example("a😀b".encode(), ["😀"], [2, 3, 4])
@example(b"\xed\xa0\x80", [], [1])
def test_any_cut_of_the_bytes_gives_the_text_of_the_plain_rule(data: bytes, stop: list[str], points: list[int]) -> None:
    out, stopped, _ = fold(cut(data, points), stop)
    assert ("".join(out), stopped) == slow_truth(data, stop)


@given(broken, stops, st.lists(st.integers(0, 200), max_size=12))
def test_what_was_given_out_is_always_a_beginning_of_the_whole(data: bytes, stop: list[str], points: list[int]) -> None:
    whole, _ = slow_truth(data, stop)
    state = TextFold(stop)
    so_far = ""
    for piece in cut(data, points):
        so_far += state.feed(piece).text
        assert whole.startswith(so_far)
        assert state.emitted_bytes == len(so_far.encode())


@given(broken, stops, st.lists(st.integers(0, 200), max_size=12), st.integers(0, 12), st.lists(st.integers(0, 200)))
def test_a_replay_goes_on_exactly_where_the_client_is(
    data: bytes, stop: list[str], points: list[int], lost_after: int, other_points: list[int]
) -> None:
    pieces = cut(data, points)
    first = TextFold(stop)
    delivered = "".join(first.feed(piece).text for piece in pieces[:lost_after])
    rest, stopped, second = fold(cut(data, other_points), stop, len(delivered.encode()))
    whole, really_stopped = slow_truth(data, stop)
    assert delivered + "".join(rest) == whole
    assert stopped is really_stopped
    assert second.missing_bytes == 0


@given(texts, stops)
def test_no_stop_string_and_no_start_of_one_is_given_out_before_it_is_decided(data: bytes, stop: list[str]) -> None:
    state = TextFold(stop)
    text = ""
    seen = ""
    for character in data.decode():
        seen += character
        result = state.feed(character.encode())
        text += result.text
        assert not any(s in text for s in stop)
        if result.stopped:
            return
        held = seen[len(text) :]
        assert held == max((seen[len(seen) - n :] for n in range(len(seen) + 1) if begins(seen, n, stop)), key=len)


def begins(seen: str, length: int, stop: list[str]) -> bool:
    tail = seen[len(seen) - length :]
    return any(s.startswith(tail) and s != tail for s in stop) or not tail


def test_half_a_character_waits_for_its_other_half() -> None:
    state = TextFold()
    assert [state.feed(bytes([byte])).text for byte in "€".encode()] == ["", "", "€"]


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    state = TextFold()
    assert state.feed(b"ok\xe2\x82").text == "ok"
    assert state.finish() == "\N{REPLACEMENT CHARACTER}"


def test_invalid_bytes_in_the_middle_do_not_hold_up_what_follows() -> None:
    assert TextFold().feed(b"a\xffb\xe2\x82c").text == "a\ufffdb\ufffdc"


def test_a_stop_string_across_many_pieces_is_found_and_not_given_out() -> None:
    state = TextFold(["</end>"])
    assert state.feed(b"fine<").text == "fine"
    assert state.feed(b"/e").text == ""
    assert state.feed(b"nd").text == ""
    assert state.feed(b"> and more") == state.feed(b"x") == type(state.feed(b"x"))("", True)
    assert state.finish() == ""


def test_a_start_that_was_no_stop_string_is_given_out_in_full() -> None:
    state = TextFold(["</end>"])
    assert state.feed(b"a</en").text == "a"
    assert state.feed(b"glish").text == "</english"


def test_of_overlapping_stop_strings_the_first_to_be_complete_wins() -> None:
    assert fold([b"xabcd"], ["abcd", "bc"])[0] == ["xa", ""]


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    assert fold([b"xabc"], ["bc", "abc", "c"])[0] == ["x", ""]


def test_what_was_held_back_is_given_out_at_the_end() -> None:
    state = TextFold(["stop"])
    assert state.feed(b"non-st").text == "non-"
    assert state.finish() == "st"


def test_a_replacement_character_made_at_the_end_can_complete_a_stop_string() -> None:
    state = TextFold(["a\ufffd"])
    assert state.feed(b"xa\xe2").text == "x"
    assert state.finish() == ""
    assert state.stopped


def test_a_replay_that_is_too_short_says_how_much_is_missing() -> None:
    state = TextFold(delivered_bytes=10)
    assert state.feed(b"12345678").text == ""
    assert (state.missing_bytes, state.emitted_bytes) == (2, 10)
    assert state.feed(b"9abc").text == "bc"
    assert (state.missing_bytes, state.emitted_bytes) == (0, 12)


def test_an_offset_inside_a_character_is_refused() -> None:
    with pytest.raises(ValueError, match="inside a character"):
        TextFold(delivered_bytes=1).feed("€".encode())


@pytest.mark.parametrize("stop", [[""], ["ok", ""], ["\ud800"], "bare"])
def test_stop_strings_that_cannot_be_meant_are_refused(stop: list[str]) -> None:
    with pytest.raises(ValueError, match=r"[Ss]top string"):
        TextFold(stop)


def test_a_negative_offset_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        TextFold(delivered_bytes=-1)


def test_nothing_can_follow_the_end() -> None:
    state = TextFold()
    state.finish()
    with pytest.raises(ValueError, match="finished"):
        state.feed(b"x")


def test_the_work_grows_in_proportion_to_the_text() -> None:
    """Counted in automaton steps, so a busy machine cannot fail it: a hostile stop string against its start."""
    counted = {}
    for size in (1000, 2000, 4000):
        state = TextFold(["a" * 200 + "b"])
        stops = state._stops
        assert stops is not None
        visits = 0

        class Counting(dict):  # type: ignore[type-arg]
            def get(self, key, default=None):  # type: ignore[no-untyped-def]
                nonlocal visits
                visits += 1
                return super().get(key, default)

        stops._next = [Counting(edges) for edges in stops._next]
        for _ in range(size):
            state.feed(b"a")
        assert len(state._held) <= 200
        counted[size] = visits
    assert counted[4000] <= 2.5 * counted[2000] <= 6.25 * counted[1000]
    assert counted[4000] <= 2 * 4000 + 200
