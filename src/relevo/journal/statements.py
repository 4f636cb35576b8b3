"""The named statements of queries.sql, and the schema's files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType

_NAME = re.compile(r"^-- name: ([a-z_]+)$")
_MIGRATION = re.compile(r"^(\d{4})_[a-z0-9_]+\.sql$")


def parse_statements(text: str) -> dict[str, str]:
    """Split a file of `-- name: NAME` blocks. Raises ValueError on a name used twice or without a statement."""
    found: dict[str, list[str]] = {}
    name: str | None = None
    for line in text.splitlines():
        if match := _NAME.match(line):
            name = match[1]
            if name in found:
                raise ValueError(f"the statement {name} is named twice")
            found[name] = []
        elif name is not None and line.strip() and not line.startswith("--"):
            found[name].append(line)
    for name, lines in found.items():
        if not lines:
            raise ValueError(f"the statement {name} is empty")
    return {name: "\n".join(lines).rstrip(";") for name, lines in found.items()}


@cache
def statements() -> Mapping[str, str]:
    """All statements by name."""
    return MappingProxyType(parse_statements(_read("queries.sql")))


@cache
def migrations() -> tuple[tuple[int, str], ...]:
    """(version, script) of each migration, from 1 without gaps."""
    found = sorted(_migration_files())
    for expected, (number, _) in enumerate(found, start=1):
        if number != expected:
            raise ValueError(f"migration {expected:04d} is missing")
    return tuple(found)


def schema() -> str:
    """The schema as a whole, for reading and for the test that compares it with the migrations."""
    return _read("schema.sql")


def _migration_files() -> Iterator[tuple[int, str]]:
    for entry in resources.files(__package__).joinpath("migrations").iterdir():
        if match := _MIGRATION.match(entry.name):
            yield int(match[1]), entry.read_text(encoding="utf-8")


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
