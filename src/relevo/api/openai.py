"""The OpenAI dialect: models, chat/completions, completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from relevo.api.body import read_object
from relevo.api.call import Call
from relevo.api.connection import Hangup
from relevo.api.delivery import Delivery, Write, accept
from relevo.api.front import Front
from relevo.api.openai_ask import chat_ask, completion_ask, known_model
from relevo.api.openai_chat import ChatStream, chat_answer
from relevo.api.openai_chat import answer_id as chat_id
from relevo.api.openai_completion import CompletionStream, completion_answer
from relevo.api.openai_completion import answer_id as completion_id
from relevo.api.openai_fields import SharedFields
from relevo.api.openai_stream import TextStream
from relevo.api.route import Access, GuardedRoute
from relevo.core.events import Ask
from relevo.service.facade import Ticket


class OpenAIRoutes:
    """Handlers parse, ask the service, and render."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def routes(self) -> list[GuardedRoute]:
        """The dialect's addresses."""
        key, keys = Access.KEY, self._front.keys
        return [
            GuardedRoute("GET", "/v1/models", self.models, access=key, keys=keys),
            GuardedRoute("GET", "/v1/models/{id:path}", self.model, access=key, keys=keys),
            GuardedRoute("POST", "/v1/chat/completions", self.chat, access=key, keys=keys),
            GuardedRoute("POST", "/v1/completions", self.completion, access=key, keys=keys),
        ]

    async def models(self, call: Call) -> None:
        """All models, from memory, in any state."""
        await call.reply_json(
            {"object": "list", "data": [_model_object(model) for model in self._front.service.models()]}
        )

    async def model(self, call: Call) -> None:
        """One model by name or alias."""
        await call.reply_json(_model_object(known_model(call.path_params["id"], self._front.service.models())))

    async def chat(self, call: Call) -> None:
        """A chat, streamed or whole."""
        limits = self._front.config.limits
        body = await read_object(call, limits)
        ask, fields = chat_ask(call, body, limits, self._front.service.models())
        async with Hangup(call.receive) as hangup:
            ticket = await accept(self._front.service, ask, hangup, self._front.farewells)
            dialect = partial(ChatStream, chat_id(ticket.request_id), ticket.created, ask.model)
            write = partial(chat_answer, ticket.request_id, ticket.created, ask.model)
            await self._deliver(call, ticket, ask, _stream_of(dialect, ask, fields), write, hangup)

    async def completion(self, call: Call) -> None:
        """A plain completion, streamed or whole."""
        limits = self._front.config.limits
        body = await read_object(call, limits)
        ask, fields = completion_ask(call, body, limits, self._front.service.models())
        echo = ask.prompt if fields.echo and isinstance(ask.prompt, str) else ""
        async with Hangup(call.receive) as hangup:
            ticket = await accept(self._front.service, ask, hangup, self._front.farewells)
            dialect = partial(CompletionStream, completion_id(ticket.request_id), ticket.created, ask.model, echo=echo)
            write = partial(completion_answer, ticket.request_id, ticket.created, ask.model, echo=echo)
            await self._deliver(call, ticket, ask, _stream_of(dialect, ask, fields), write, hangup)

    async def _deliver(
        self, call: Call, ticket: Ticket, ask: Ask, dialect: TextStream | None, write: Write, hangup: Hangup
    ) -> None:
        delivery = Delivery(call, ticket, self._front.pace, self._front.farewells)
        if dialect is not None:
            await delivery.stream(dialect, hangup)
        else:
            await delivery.collect(ask.n, write, hangup)


def _stream_of(dialect: partial[Any], ask: Ask, fields: SharedFields) -> TextStream | None:
    if not ask.stream:
        return None
    usage = fields.stream_options is not None and bool(fields.stream_options.include_usage)
    stream: TextStream = dialect(choices=ask.n, include_usage=usage)
    return stream


def _model_object(model: dict[str, Any]) -> dict[str, Any]:
    """A model as OpenAI lists it; what we know beyond that stands under `relevo`, which clients ignore."""
    own = {
        "id": model["id"],
        "object": "model",
        "created": int(model.get("created") or 0),
        "owned_by": model.get("owned_by") or "relevo",
    }
    return {**own, "relevo": {name: value for name, value in model.items() if name not in own}}
