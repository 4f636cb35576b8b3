"""What was learned of the lengths of answers is there again after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from relevo.core.forecast import Forecast
from relevo.journal import PutFact
from relevo.service.lengths import LENGTHS_FACT, AnswerLengths

from .fakes.journal_kit import opened


def models() -> dict[str, Any]:
    return {"m": SimpleNamespace(preferred=SimpleNamespace(forecast=Forecast()))}


async def answered(folder: Path, lengths: list[int], *, worth: int = 1) -> None:
    known = models()
    async with opened(folder) as journal:
        kept = AnswerLengths(journal, known)
        await kept.recall()
        for tokens in lengths:
            known["m"].preferred.forecast.outputs.add(tokens)
        kept.keep(worth=worth)


async def recalled(folder: Path) -> list[int]:
    known = models()
    async with opened(folder) as journal:
        await AnswerLengths(journal, known).recall()
    return list(known["m"].preferred.forecast.outputs.values)


def test_lengths_survive_a_restart_in_their_order_and_grow(tmp_path: Path) -> None:
    asyncio.run(answered(tmp_path, [30, 10, 20]))
    asyncio.run(answered(tmp_path, [40]))
    assert asyncio.run(recalled(tmp_path)) == [30, 10, 20, 40]


def test_a_few_new_ones_are_not_worth_a_write_before_the_service_stops(tmp_path: Path) -> None:
    asyncio.run(answered(tmp_path, [30] * 15, worth=16))
    assert asyncio.run(recalled(tmp_path)) == []
    asyncio.run(answered(tmp_path, [30] * 16, worth=16))
    assert len(asyncio.run(recalled(tmp_path))) == 16


def test_lengths_that_cannot_be_read_are_learned_anew(tmp_path: Path) -> None:
    async def damage() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(PutFact(key=LENGTHS_FACT + "m", value=b'{"not": "a list"}'))

    asyncio.run(damage())
    assert asyncio.run(recalled(tmp_path)) == []
