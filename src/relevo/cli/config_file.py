"""Changes to the configuration file that keep what its owner wrote, comments too."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relevo.config import parse_config
from relevo.core.errors import ConfigError

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

_HEADER = "# Relevo's configuration. relevo.example.toml has every field with its reason.\n\n"


def edit_config(path: Path, change: Callable[[TOMLDocument], None]) -> Path | None:
    """Change the file at `path`, or make it. Returns where the old one was kept, if there was one and it changed.

    The result is read back and checked before it replaces anything, in one step. Raises ConfigError; then nothing
    has changed.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    old = _read(path)
    try:
        document = tomlkit.parse(old if old is not None else _HEADER)
        change(document)
        new = tomlkit.dumps(document)
    except TOMLKitError as e:
        raise ConfigError(f"The configuration {path} cannot be changed: {e}.") from None
    parse_config(new, str(path))
    if new == old:
        return None
    kept = None if old is None else path.with_name(path.name + ".bak")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if kept is not None and old is not None:
            _write(kept, old, like=path)
        _write(path, new, like=path)
    except OSError as e:
        raise ConfigError(f"The configuration {path} cannot be written: {e.strerror}.") from None
    return kept


def put(document: TOMLDocument, table: tuple[str, ...], values: dict[str, Any]) -> None:
    """Set fields of a table, made where it is missing."""
    import tomlkit

    place: Any = document
    for depth, name in enumerate(table):
        if name not in place:
            made = tomlkit.table(is_super_table=depth < len(table) - 1)
            place.add(name, made)
        place = place[name]
    for name, value in values.items():
        place[name] = value


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"The configuration {path} cannot be read: {e}.") from None


def _write(path: Path, text: str, *, like: Path) -> None:
    """Replace a file in one step, with the mode its owner gave it. A link stays a link."""
    path = path.resolve()
    mode = like.stat().st_mode & 0o777 if like.exists() else 0o600
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".relevo-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
