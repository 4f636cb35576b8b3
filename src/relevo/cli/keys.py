"""`relevo keys`: who may use the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    from relevo.api.keys import Changes, Key, KeyRing
    from relevo.core.grant import PolicyName

app = cyclopts.App(
    name="keys",
    help="Make, change, list and revoke the keys that open the server. Once there is a key, every client needs one; "
    "a running server takes changes up at once.",
    result_action="return_value",
)


Working = Annotated[str, Parameter(name="NAME", help="The key's name, its id, or the beginning of its id.")]
KeyPolicy = Literal["model", "auto", "gpu-only", "cpu-only"]
"""`model`: as the configuration of the model says."""
POLICY_HELP = (
    "Which routes its requests may take when they do not say so themselves; `model`: as the model's configuration."
)
FIXED_HELP = "Refuse requests that ask for another policy."
PRIORITY_HELP = "-100 to 100: where its requests stand in line. A request may ask for less, never for more."


@app.command
def create(
    name: Annotated[str, Parameter(name="NAME", help="Whom the key is for, such as `open-webui`.")],
    /,
    *,
    policy: Annotated[KeyPolicy, Parameter(help=POLICY_HELP)] = "model",
    policy_fixed: Annotated[bool, Parameter(help=FIXED_HELP)] = False,
    priority: Annotated[int, Parameter(help=PRIORITY_HELP)] = 0,
    place: Place = NO_PLACE,
    json: Json = False,
) -> int:
    """Make a key and show it, this once."""
    from relevo.core.grant import Grant
    from relevo.journal.folder import make_folder

    state = place.paths().state
    make_folder(state)
    ring = open_ring(place)
    first = not ring.required
    key, secret = ring.create(name, Grant(_policy(policy), policy_fixed, priority))
    if json:
        print_json({**view(key), "key": secret})
        return 0
    say(secret)
    say(f"This is the key of {key.name}. It is shown only now; only its hash is kept, in {place.paths().keys}.")
    if first:
        say("It is the first one: from now on every client of this server needs a key.")
    return 0


@app.command(name="set")
def set_key(
    name: Working,
    /,
    *,
    policy: Annotated[KeyPolicy | None, Parameter(help=POLICY_HELP)] = None,
    policy_fixed: Annotated[bool | None, Parameter(help=FIXED_HELP)] = None,
    priority: Annotated[int | None, Parameter(help=PRIORITY_HELP)] = None,
    place: Place = NO_PLACE,
    json: Json = False,
) -> int:
    """Change what a key gives its requests, from the next one on. What is left out stays."""
    from relevo.core.errors import BadRequest

    changes: Changes = {}
    if policy is not None:
        changes["policy"] = _policy(policy)
    if policy_fixed is not None:
        changes["policy_fixed"] = policy_fixed
    if priority is not None:
        changes["priority"] = priority
    if not changes:
        raise BadRequest("Nothing is to be changed: give --policy, --policy-fixed, --no-policy-fixed or --priority.")
    key = open_ring(place).regrant(name, **changes)
    if json:
        print_json(view(key))
    else:
        say(f"Requests of {key.name} ({key.id}) have the policy {_policy_text(key)} and the priority {key.priority}.")
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
    made = table("", "name", "id", "policy", "priority", "created", "revoked", numbers=("priority",))
    for key in ring.list():
        made.add_row(
            key.name, key.id, _policy_text(key), str(key.priority), time_text(key.created), time_text(key.revoked)
        )
    console().print(made)
    return 0


@app.command
def revoke(
    name: Working,
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
    return {
        "id": key.id,
        "name": key.name,
        "policy": key.policy,
        "policy_fixed": key.policy_fixed,
        "priority": key.priority,
        "created": key.created,
        "revoked": key.revoked,
    }


def _policy(chosen: KeyPolicy) -> PolicyName | None:
    return None if chosen == "model" else chosen


def _policy_text(key: Key) -> str:
    return (key.policy or "model") + (", fixed" if key.policy_fixed else "")
