"""JSON from strangers."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relevo.api.strict_json import body_digest, parse_json
from relevo.core.errors import BadRequest


def parse(data: bytes, depth: int = 8, nodes: int = 50):
    return parse_json(data, depth=depth, nodes=nodes)


HOSTILE = {
    "empty": (b"", "not valid JSON"),
    "only white space": (b"  ", "not valid JSON"),
    "cut short": (b'{"a": [1, 2', "not valid JSON"),
    "rest behind": (b"{} x", "not valid JSON"),
    "two values": (b"{}{}", "not valid JSON"),
    "single quotes": (b"{'a': 1}", "not valid JSON"),
    "trailing comma": (b'{"a": 1,}', "not valid JSON"),
    "comment": (b"{/* */}", "not valid JSON"),
    "raw control letter": (b'{"a": "\x01"}', "not valid JSON"),
    "bad escape": (b'{"a": "\\x"}', "not valid JSON"),
    "leading zero": (b'{"a": 012}', "not valid JSON"),
    "plus sign": (b'{"a": +1}', "not valid JSON"),
    "hex": (b'{"a": 0x10}', "not valid JSON"),
    "open string": (b'"' + b'\\"' * 5000, "not valid JSON"),
    "byte order mark": (b"\xef\xbb\xbf{}", "not valid JSON"),
    "NaN": (b'{"a": NaN}', "NaN is not a JSON number"),
    "Infinity": (b"[Infinity]", "Infinity is not a JSON number"),
    "minus Infinity": (b"[-Infinity]", "-Infinity is not a JSON number"),
    "broken UTF-8": (b'{"a": "\xff"}', "not valid UTF-8"),
    "overlong UTF-8": (b'"\xc0\xaf"', "not valid UTF-8"),
    "surrogate in UTF-8": (b'"\xed\xa0\x80"', "not valid UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not valid UTF-8"),
    "UTF-32": ('{"a": 1}'.encode("utf-32-le"), "not valid JSON"),
    "deep lists": (b"[" * 9 + b"]" * 9, "too deep"),
    "very deep lists": (b"[" * 2_000_000, "too"),
    "deep objects": (b'{"a":' * 9 + b"1" + b"}" * 9, "too deep"),
    "many values": (b"[" + b"1," * 60 + b"1]", "too many values"),
    "many lists": (b"[" + b"[]," * 60 + b"[]]", "too many values"),
    "many members": (json.dumps({str(i): i for i in range(60)}).encode(), "too many values"),
    "long number": (b'{"a": ' + b"1" * 65 + b"}", "more than 64"),
    "long fraction": (b"[0." + b"1" * 64 + b"]", "more than 64"),
    "long exponent": (b"[1e" + b"0" * 64 + b"1]", "more than 64"),
    "huge float": (b"[1e400]", "out of range"),
    "same key twice": (b'{"a": 1, "a": 2}', "given twice"),
    "same key twice inside": (b'{"b": [{"a": 1, "\\u0061": 2}]}', "given twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_a_clear_refusal(name: str):
    data, words = HOSTILE[name]
    with pytest.raises(BadRequest, match=words):
        parse(data)


def test_a_number_out_of_range_is_named_by_its_path():
    with pytest.raises(BadRequest) as caught:
        parse(b'{"a": [{"b": 1, "c": -1e999}]}')
    assert caught.value.param == "a[0].c"


@pytest.mark.parametrize(
    "data",
    [
        b'{"text": "' + b"-" * 500 + b", [{ " * 30 + b'"}',  # prose looks like numbers, commas and brackets
        b'{"text": "' + b'\\"[\\\\' * 100 + b'"}',
        b'["' + b"9" * 200 + b'"]',
        b"[" * 8 + b"]" * 8,
        b"[" + b"1," * 40 + b"1]",
        b"[" + b"1" * 64 + b"]",
    ],
)
def test_text_that_only_looks_dangerous_is_read(data: bytes):
    assert parse(data) == json.loads(data)


def test_depth_and_count_are_exact_at_the_limit():
    nest = b"[" * 8 + b"]" * 8
    assert parse(nest, depth=8) is not None
    with pytest.raises(BadRequest):
        parse(nest, depth=7)


@pytest.mark.parametrize(
    "data",
    [
        b'"' + b'\\"' * 4_000_000,
        b"[" * 8_000_000,
        b'["' + b'","' * 2_500_000 + b'"]',
        b"[" + b"{}," * 2_500_000 + b"{}]",
        b'{"a":"' + b"," * 8_000_000 + b'"}',
        b"[" + b"-" * 8_000_000,
        b"[" + b"1" * 8_000_000 + b"]",
    ],
    ids=["escaped quotes", "brackets", "texts", "objects", "commas in a text", "signs", "digits"],
)
def test_eight_hostile_megabytes_cost_little_time(data: bytes):
    started = time.process_time()
    with contextlib.suppress(BadRequest):
        parse_json(data, depth=64, nodes=100_000)
    assert time.process_time() - started < 1.0


def test_half_a_surrogate_pair_is_refused_when_the_body_is_digested():
    body = parse(b'{"a": "\\ud800"}')
    with pytest.raises(BadRequest, match="surrogate"):
        body_digest("/v1", body)


def test_the_digest_knows_content_and_route_but_not_order_or_space():
    one, two = parse(b'{"a": 1, "b": [2]}'), parse(b'{ "b" : [ 2 ],"a":1}')
    assert body_digest("/v1", one) == body_digest("/v1", two)
    assert body_digest("/v1", one) != body_digest("/v2", one)
    assert body_digest("/v1", one) != body_digest("/v1", parse(b'{"a": 1, "b": [3]}'))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(values)
def test_whatever_fits_the_limits_is_read_as_the_standard_library_reads_it(value: object):
    data = json.dumps(value).encode()
    assert parse_json(data, depth=64, nodes=1000) == value


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_clear_refusal(data: bytes):
    try:
        parse(data)
    except BadRequest as error:
        assert error.message
