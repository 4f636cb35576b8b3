"""`relevo devices`: what a person does about a device."""

from __future__ import annotations

from typing import Annotated

import cyclopts
from cyclopts import Parameter

from relevo.cli.output import plain, print_json, say
from relevo.cli.place import NO_SERVICE_PLACE, Json, ServicePlace

app = cyclopts.App(
    name="devices",
    help="Act on the devices that the service leases memory from; `relevo status` shows them.",
    result_action="return_value",
)


@app.command
def probe(
    name: Annotated[str, Parameter(name="NAME", help="The device, as `relevo status` names it: `gpu0`, `host`.")],
    /,
    *,
    place: ServicePlace = NO_SERVICE_PLACE,
    json: Json = False,
) -> int:
    """Try a device again now: starts workers that gave up or back off, and probes it if its breaker is open."""
    from urllib.parse import quote

    from relevo.cli.running import running

    with running(place) as service:
        device = dict(service.post(f"/relevo/v1/devices/{quote(name, safe='')}/probe"))
    if json:
        print_json(device)
    else:
        say(f"{plain(name)} is tried again; `relevo status --watch` shows what comes of it.")
    return 0
