"""`relevo keys`: who may use the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter

from relevo.cli.output import (
    console,
    print_json,
    say,
    table,
    time_text,
)
from relevo.cli.place import NO_PLACE, Json, Place

if TYPE_CHECKING:
    from relevo.api.keys import Key, KeyRing

app = cyclopts.App(
    name="keys",
    help="Make, list and revoke the keys that open the server. Once there is a key, every client needs one; "
    "a running server takes changes up at once.",
    result_action="return_value",
)


@app.command
def create(
    name: Annotated[str, Parameter(name="NAME", help="Whom the key is for, such as `open-webui`.")],
    /,
    *,
    place: Place = NO_PLACE,
    json: Json = False,
) -> int:
    """Make a key and show it, this once."""
    from relevo.journal.folder import make_folder

    state = place.paths().state
    make_folder(state)
    ring = open_ring(place)
    first = not ring.required
    key, secret = ring.create(name)
    if json:
        print_json({**view(key), "key": secret})
        return 0
    say(secret)
    say(f"This is the key of {key.name}. It is shown only now; only its hash is kept, in {place.paths().keys}.")
    if first:
        say("It is the first one: from now on every client of this server needs a key.")
    return 0


@app.command(name="list")
def list_keys(*, place: Place = NO_PLACE, json: Json = False) -> int:
    """List the keys, never their secrets."""
    ring = open_ring(place)
    if json:
        print_json({"required": ring.required, "keys": [view(key) for key in ring.list()]})
        return 0
    if not ring.list():
        say("There are no keys: anybody who reaches this server may use it. `relevo keys create NAME` makes one.")
        return 0
    made = table("", "name", "id", "created", "revoked")
    for key in ring.list():
        made.add_row(key.name, key.id, time_text(key.created), time_text(key.revoked))
    console().print(made)
    return 0


@app.command
def revoke(
    name: Annotated[str, Parameter(name="NAME", help="The key's name, its id, or the beginning of its id.")],
    /,
    *,
    place: Place = NO_PLACE,
    json: Json = False,
) -> int:
    """Revoke a key, at once and for good."""
    key = open_ring(place).revoke(name)
    if json:
        print_json(view(key))
    else:
        say(f"The key of {key.name} ({key.id}) opens nothing any more.")
    return 0


def open_ring(place: Place) -> KeyRing:
    """The keys of this state folder. Raises StartupError where their file is damaged."""
    from relevo.api.keys import KeyRing

    return KeyRing(place.paths().keys)


def view(key: Key) -> dict[str, Any]:
    """What may be shown of a key."""
    return {"id": key.id, "name": key.name, "created": key.created, "revoked": key.revoked}
