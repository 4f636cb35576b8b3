"""Who a worker is: its fingerprint, whether a model's routes are twins, and its known answer to the fixed probe."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from relevo.core.events import Ready, StartModel
from relevo.journal import Journal, PutFact
from relevo.models.fingerprint import Fingerprint, differences, fingerprint, weights_digest
from relevo.service.routes import Route, ServedModel

_log = logging.getLogger("relevo.identity")

ANSWER_FACT = "answer:"


def placement(start: StartModel) -> str:
    """What of a load decides its arithmetic besides library and device: who computes which layers, in what order."""
    layers = f"{start.gpu_layers} layers on it, experts of {start.host_expert_layers} in RAM"
    return f"{layers}, {'repacked' if start.repack else 'as filed'}, {start.ubatch_tokens} rows at once"


class Identities:
    """Knows the content hash of each model file; hashing a large one takes a while and is done beside the loading."""

    def __init__(self, journal: Journal, state: Path) -> None:
        self._journal = journal
        self._state = state
        self._weights: dict[str, asyncio.Task[str]] = {}
        self._known: dict[tuple[str, str], Fingerprint] = {}

    def learn(self, model: ServedModel, tasks: asyncio.TaskGroup) -> None:
        """Begin to hash a model's file, off the loop. The hash is remembered while the file is unchanged."""
        hashing = asyncio.to_thread(weights_digest, Path(model.config.path).expanduser(), self._state)
        self._weights[model.name] = tasks.create_task(hashing, name=f"hash {model.name}")

    async def identify(
        self, model: ServedModel, route: Route, ready: Ready, start: StartModel, where: str
    ) -> str | None:
        """Give the route its fingerprint. Returns a sentence when this worker must not be used, else None.

        `start` is how it was loaded, reduced or in parts as it may be; `where` describes the device and its driver.
        Each of these may answer otherwise, and is another fingerprint.

        It must not be used where its answer to the fixed probe is not the one that the same fingerprint gave before:
        then something computes differently than it did, and nobody was told.
        """
        text = await model.text.wait_ready()
        found = fingerprint(
            model.header,
            await self._weights[model.name],
            text.template_digest,
            kv_type=start.kv_type,
            flash_attention=start.flash_attention,
            profile=model.config.profile,
            engine=ready.engine,
            library=f"{ready.library} on {ready.device}, {where}, {placement(start)}",
        )
        route.fingerprint = found.short
        self._known[model.name, route.name] = found
        self._compare_twins(model)
        return await self._check_answer(found, ready.probe_tokens)

    def _compare_twins(self, model: ServedModel) -> None:
        """Routes of one model that differ in what must agree are no twins: said loudly, because it is our mistake."""
        known = [self._known[model.name, name] for name in model.routes if (model.name, name) in self._known]
        for other in known[1:]:
            for difference in differences(known[0], other):
                _log.error("the routes of %s are no twins: %s", model.name, difference)

    async def _check_answer(self, found: Fingerprint, tokens: list[int]) -> str | None:
        key = ANSWER_FACT + found.digest
        before = await self._journal.fact(key)
        if before is None:
            await self._journal.commit(PutFact(key=key, value=msgspec.json.encode(tokens)))
            return None
        if msgspec.json.decode(before) == tokens:
            return None
        return (
            "The answer to the fixed probe is not the one this build gave before on this device: "
            "the device or its driver changed, or its arithmetic is broken."
        )
