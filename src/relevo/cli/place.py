"""The options that say which Relevo is meant, the same for every command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from relevo.config import Config
    from relevo.service.paths import Paths

Json = Annotated[bool, Parameter(name="--json", negative=(), show_default=False, help="Print the facts as JSON.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A state folder and a configuration file."""

    state: Annotated[Path | None, Parameter(help="State folder. Else RELEVO_STATE, else your own.")] = None
    config: Annotated[Path | None, Parameter(help="Configuration file. Else RELEVO_CONFIG, else your own.")] = None

    def paths(self) -> Paths:
        """Where things lie."""
        from relevo.service.paths import find_paths

        return find_paths(state=self.state, config=self.config)

    def load(self, *, may_be_missing: bool = False) -> Config:
        """The configuration. Raises ConfigError. `may_be_missing`: a named file may be about to be made."""
        from relevo.config import Config

        paths = self.paths()
        if may_be_missing and not paths.config.exists():
            return Config()
        return load_config_at(paths)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlace(Place):
    """A place, and how to reach the service that runs there."""

    url: Annotated[str | None, Parameter(help="Address of the service. Else found by the state folder.")] = None
    key: Annotated[str | None, Parameter(help="Key, where the server needs one. Better: RELEVO_KEY.")] = None


NO_PLACE = Place()
NO_SERVICE_PLACE = ServicePlace()


def load_config_at(paths: Paths) -> Config:
    """The file at its place; all defaults where nobody named one and none is there. Raises ConfigError."""
    from relevo.config import Config, load_config

    if not paths.config_named and not paths.config.exists():
        return Config()
    return load_config(paths.config)
