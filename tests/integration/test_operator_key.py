"""The operator's own key: who owns the state folder is never locked out by keys."""

from __future__ import annotations

from pathlib import Path

from relevo.api.operator import FILE_NAME, OperatorKey, read_operator_key


def test_the_operators_key_is_readable_by_its_owner_alone_and_new_at_each_start(tmp_path: Path) -> None:
    first = OperatorKey(tmp_path)
    written = read_operator_key(tmp_path)
    assert written is not None and first.is_this(written)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    second = OperatorKey(tmp_path)
    assert not second.is_this(written)


def test_a_wrong_text_is_never_the_operators_key(tmp_path: Path) -> None:
    key = OperatorKey(tmp_path)
    for wrong in ("", "ro-", "x" * 500, "\udcff"):
        assert not key.is_this(wrong)


def test_without_a_service_there_is_no_operators_key(tmp_path: Path) -> None:
    assert read_operator_key(tmp_path) is None
