"""What loads taught about memory, kept in the journal: bounded, read back in order, and added to older files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import pytest

from relevo.core.memory.learned import Circumstances, Key, Lessons, Observation, decode, encode
from relevo.core.memory.load import DEVICE_START
from relevo.core.memory.tier import Tier
from relevo.journal import AddMeasurement, BadOperation, Journal, MeasurementRecord, apply, database
from relevo.journal.audit import audit
from relevo.journal.statements import migrations

from .fakes.journal_kit import accept, end, opened

MIB = 1 << 20


def measured(key: str, number: int = 0, **more: str) -> AddMeasurement:
    values = {"engine": "llama.cpp CUDA v0.5.0", "driver": "570.10"} | more
    return AddMeasurement(key=key, at=1000.0 + number, value=b'{"number": %d}' % number, **values)


def numbers(records: list[MeasurementRecord]) -> list[int]:
    return [round(record.at - 1000.0) for record in records]


def test_measurements_are_read_back_as_they_were_in_their_order(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(measured("a", 1), measured("b", 2))
            await journal.commit(measured("a", 3, driver="580.01"))
        async with opened(tmp_path) as journal:
            assert numbers(await journal.measurements()) == [1, 2, 3]
            assert await journal.measurements("b") == [
                MeasurementRecord("b", "llama.cpp CUDA v0.5.0", "570.10", 1002.0, b'{"number": 2}')
            ]
            assert numbers(await journal.measurements("a")) == [1, 3]
            assert numbers(await journal.measurements("a", driver="580.01")) == [3]
            assert numbers(await journal.measurements(driver="570.10")) == [1, 2]
            assert await journal.measurements(engine="llama.cpp Vulkan") == []
        with Journal.open_reader(tmp_path) as reader:
            assert numbers(reader.measurements()) == [1, 2, 3]
            assert audit(reader) == []

    asyncio.run(run())


def test_of_each_key_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "MEASUREMENTS_PER_KEY", 3)

    async def run() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(measured("rare", 0))
            for number in range(1, 7):
                await journal.commit(measured("often", number))
            assert numbers(await journal.measurements("often")) == [4, 5, 6]
            assert numbers(await journal.measurements("rare")) == [0]

    asyncio.run(run())


def test_of_all_keys_together_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "MEASUREMENTS", 10)

    async def run() -> None:
        async with opened(tmp_path) as journal:
            await journal.commit(*(measured(f"key {number}", number) for number in range(50)))
            assert numbers(await journal.measurements()) == list(range(40, 50))

    asyncio.run(run())


@pytest.mark.parametrize("value", [b"x" * (apply.MEASUREMENT_BYTES + 1), "text"])
def test_what_is_no_measurement_is_refused_alone(tmp_path: Path, value: bytes) -> None:
    async def run() -> None:
        async with opened(tmp_path) as journal:
            bad = AddMeasurement(key="a", engine="e", driver="d", at=1.0, value=value)
            good = journal.submit(measured("a", 1))
            with pytest.raises(BadOperation, match="AddMeasurement cannot be recorded"):
                await journal.commit(bad)
            await good
            assert numbers(await journal.measurements()) == [1]

    asyncio.run(run())


def old_file(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal as the first release made it: by its one migration, with its requests and facts."""
    first = migrations()[:1]
    with monkeypatch.context() as patch:
        patch.setattr(database, "migrations", lambda: first)

        async def run() -> None:
            async with opened(state) as journal:
                await journal.commit(accept("old"), end("old"))
                await journal.commit(accept("open"))

        asyncio.run(run())
    db = apsw.Connection(str(state / "journal.db"))
    assert db.pragma("user_version") == 1
    assert db.execute("SELECT count(*) FROM sqlite_schema WHERE name LIKE 'measurements%'").fetchone() == (0,)
    db.close()


def test_a_file_of_the_first_schema_gets_its_table_and_keeps_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_file(tmp_path, monkeypatch)

    async def run() -> None:
        async with opened(tmp_path) as journal:
            assert (await journal.counts()).accepted_in_all == 2
            assert [record.summary.id for record in await journal.open_requests()] == ["req_open"]
            assert await journal.measurements() == []
            await journal.commit(measured("a", 1))
            assert journal.missing_after_crash is None

    asyncio.run(run())
    with Journal.open_reader(tmp_path) as reader:
        assert reader.connection.pragma("user_version") == len(migrations())
        assert numbers(reader.measurements("a")) == [1]
        assert audit(reader) == []


def test_what_was_learned_is_known_again_after_a_restart(tmp_path: Path) -> None:
    key, under = Key("sha256:8b", "gpu0", "context=8192"), Circumstances("llama.cpp CUDA", "v0.5.0", "570.10")
    seen = Observation(
        key=key,
        under=under,
        at=1000.0,
        predicted={"weights_bytes": 4403 * MIB},
        reported={"weights_bytes": 4403 * MIB},
        loaded_bytes=4713 * MIB,
        peak_bytes=4773 * MIB,
    )

    async def run() -> Lessons:
        async with opened(tmp_path) as journal:
            engine = f"{under.engine_kind} {under.engine_build}"
            await journal.commit(
                AddMeasurement(key=key.text, engine=engine, driver=under.driver, at=seen.at, value=encode(seen))
            )
        async with opened(tmp_path) as journal:
            return Lessons(decode(record.value) for record in await journal.measurements())

    found = asyncio.run(run()).learned(key, under, predicted_by=Tier.CLOSED_FORM, start=DEVICE_START["nvidia"])
    assert (found.context_bytes, found.pool_bytes, found.tier) == (310 * MIB, 60 * MIB, Tier.LEARNED)
