"""Where things lie on this machine: the state folder, the configuration file and the cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

STATE_VARIABLE = "RELEVO_STATE"
CONFIG_VARIABLE = "RELEVO_CONFIG"
_NAME = "relevo"


@dataclass(frozen=True, slots=True)
class Paths:
    """One Relevo's places. The state folder is its identity: two services never share one."""

    state: Path
    """Journal, keys, lock: what must survive."""
    config: Path
    """The configuration file. It need not exist unless it was named."""
    cache: Path
    """What can be fetched again: libraries, the demo model."""
    config_named: bool = False
    """Whether somebody named the configuration file, so that its absence is a mistake."""

    @property
    def keys(self) -> Path:
        """The file of key hashes."""
        return self.state / "keys.json"


def find_paths(
    *, state: Path | None = None, config: Path | None = None, environment: Mapping[str, str] | None = None
) -> Paths:
    """What the command line names, else RELEVO_STATE and RELEVO_CONFIG, else the user's own folders (XDG on Linux)."""
    if environment is None:
        environment = os.environ
    named_config = config or _from(environment, CONFIG_VARIABLE)
    return Paths(
        state=_absolute(state or _from(environment, STATE_VARIABLE) or platformdirs.user_state_path(_NAME)),
        config=_absolute(named_config or platformdirs.user_config_path(_NAME) / "relevo.toml"),
        cache=_absolute(platformdirs.user_cache_path(_NAME)),
        config_named=named_config is not None,
    )


def _from(environment: Mapping[str, str], variable: str) -> Path | None:
    value = environment.get(variable, "")
    return Path(value) if value else None


def _absolute(path: Path) -> Path:
    # absolute, not resolved: what is shown stays what was typed, and links keep working
    return path.expanduser().absolute()
