"""Random requests: whatever comes in, the answer is an answer or a client error, never a fault of ours."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from relevo.api.app import create_app
from relevo.api.keys import KeyRing
from relevo.api.openai_fields import REFUSED, ChatFields, CompletionFields
from relevo.config import Config
from tests.integration.fakes.fake_service import FakeService

PATHS = ["/v1/chat/completions", "/v1/completions"]
FIELDS = sorted({*ChatFields.__struct_fields__, *CompletionFields.__struct_fields__, *REFUSED, "made_up"})
HEADERS = [
    b"idempotency-key",
    b"x-relevo-policy",
    b"x-relevo-priority",
    b"x-relevo-handover",
    b"x-relevo-deadline-s",
    b"authorization",
]
HEADERS += [b"x-stainless-retry-count", b"origin", b"host", b"content-encoding", b"content-length", b"last-event-id"]

numbers = st.integers(-(10**20), 10**20) | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 1e308])
leaves = st.none() | st.booleans() | numbers | st.text(max_size=8) | st.sampled_from(["text", "demo", "auto", "user"])
anything = st.recursive(
    leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3), max_leaves=6
)
keys = st.sampled_from(["role", "content", "type", "text", "function", "name", "tool_calls", "1", "include_usage"])
shaped = st.lists(st.dictionaries(keys, anything, max_size=4), max_size=3)
bodies = st.dictionaries(st.sampled_from(FIELDS), anything | shaped, max_size=5)
lines = st.lists(st.tuples(st.sampled_from(HEADERS), st.binary(max_size=12)), max_size=2)
start = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "prompt": "x"}


def answer(method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[int, bytes]:
    sent: list[dict[str, Any]] = []

    async def run() -> None:
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return parts.pop() if parts else await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "server": ("127.0.0.1", 1), "headers": headers,
        }  # fmt: skip
        await create_app(FakeService(), Config(), KeyRing(None))(scope, receive, send)

    asyncio.run(run())
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(PATHS), bodies, st.booleans())
def test_any_body_gets_an_answer_or_a_client_error(path: str, fields: dict[str, Any], whole: bool):
    data = json.dumps({**start, **fields} if whole else fields).encode()
    status, body = answer("POST", path, data, [(b"host", b"localhost")])
    assert status in (200, 400, 404), body
    if status != 200:
        error = json.loads(body)["error"]
        assert error["message"].endswith(".") and error["type"] == "invalid_request_error"


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*PATHS, "/relevo/v1/requests", "/"]), st.sampled_from(["GET", "POST", "PUT"]), lines)
def test_any_header_gets_an_answer_or_a_client_error(path: str, method: str, more: list[tuple[bytes, bytes]]):
    headers = [(b"host", b"localhost"), *more]
    status, _ = answer(method, path, json.dumps(start).encode(), headers)
    assert status == 200 or 400 <= status < 500
