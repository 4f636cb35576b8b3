"""Records too large for a frame: the same record comes out of the file, and nothing else does."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from relevo.core.events import MAX_FRAME_BYTES, FromText, Render, Rendered, Tokenize
from relevo.models import payload
from relevo.models.payload import PayloadError, spill, whole

LONG = "é" * MAX_FRAME_BYTES


def test_what_fits_in_a_frame_stays_in_it(tmp_path: Path) -> None:
    record = Tokenize(1, "short")
    assert spill(record, tmp_path) is record
    assert whole(record) is record
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "record",
    [
        Render(1, [{"role": "user", "content": LONG}], [{"a": 1}], {"b": True}),
        Render(2, [{"role": "user", "content": "x"}], [LONG]),
        Tokenize(3, LONG, add_bos=False, special=True),
        Rendered(4, list(range(300_000)), LONG),
    ],
)
def test_a_large_record_comes_back_whole_and_its_frame_is_small(
    record: Render | Tokenize | Rendered, tmp_path: Path
) -> None:
    small = spill(record, tmp_path)
    assert len(msgspec.msgpack.encode(small)) < 2000
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert whole(small) == record
    assert whole(small, delete=True) == record
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_or_beyond_the_bound_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PayloadError, match="no folder"):
        spill(Tokenize(1, LONG), None)
    with pytest.raises(PayloadError, match="cannot be written"):
        spill(Tokenize(1, LONG), tmp_path / "gone")
    small = spill(Tokenize(1, LONG), tmp_path)
    monkeypatch.setattr(payload, "MAX_PAYLOAD_BYTES", MAX_FRAME_BYTES + 5)
    with pytest.raises(PayloadError, match="more than the"):
        spill(Tokenize(1, LONG), tmp_path)
    with pytest.raises(PayloadError, match="larger than"):
        whole(small)


def test_a_file_of_another_call_or_kind_is_not_taken(tmp_path: Path) -> None:
    small = spill(Tokenize(1, LONG), tmp_path)
    with pytest.raises(PayloadError, match="another call"):
        whole(Tokenize(2, "", payload_path=small.payload_path))
    with pytest.raises(PayloadError, match="understood"):
        whole(Rendered(1, [], payload_path=small.payload_path))
    with pytest.raises(PayloadError, match="cannot be read"):
        whole(Tokenize(1, "", payload_path=str(tmp_path / "gone")))
    knot = tmp_path / "knot"
    knot.write_bytes(msgspec.msgpack.encode(Tokenize(1, "", payload_path=str(knot))))
    with pytest.raises(PayloadError, match="another call"):
        whole(Tokenize(1, "", payload_path=str(knot)))


def test_the_small_record_travels_as_any_other(tmp_path: Path) -> None:
    small = spill(Rendered(9, [1], LONG), tmp_path)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(small), type=FromText) == small
