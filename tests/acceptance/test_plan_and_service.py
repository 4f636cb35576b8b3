"""What `relevo plan` says beforehand is what the service then does: the same figures, the same rung of the ladder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from relevo.setup.demo import find

from .house import House, wait_for

MIB = 2**20


def planned(house: House) -> dict[str, Any]:
    """The command, on the state folder and configuration of this house."""
    done = subprocess.run(
        [sys.executable, "-m", "relevo", "plan", "smol", "--json", "--state", str(house.state), *house.arguments[2:]],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def load_of(house: House, route: str) -> dict[str, Any] | None:
    """What the service decided for a route; None before it has."""
    found = [r for r in house.status()["replicas"] if r["route"] == route and r.get("load")]
    return dict(found[0]["load"]) if found else None


@pytest.mark.parametrize(
    ("total_mib", "lines", "verdict"),
    [
        (1024, "", "admit"),
        (440, "least_context_tokens = 512\noffload = false", "reduce"),
        (360, 'reduce = []\nprofile = "strict"\nslots = 2', "offload"),
        (150, "reduce = []\noffload = false", "redirect"),
    ],
)
def test_the_service_does_what_was_planned(
    build: Callable[..., House], total_mib: int, lines: str, verdict: str
) -> None:
    slots = "" if "slots" in lines else "slots = 4\n"
    house = build(
        "--host", "127.0.0.1",
        config=f'[devices.gpu0]\nkind = "emulated"\ntotal_bytes = {total_mib * MIB}\nheadroom_bytes = {8 * MIB}\n'
        f'[models.smol]\npath = "{find()}"\ncontext_tokens = 4096\n{slots}{lines}\n',
    )  # fmt: skip
    plan = planned(house)
    assert (plan["device"], plan["fits"][0]["verdict"]) == ("gpu0", verdict)
    house.start(both_routes=False)
    twin = wait_for("the CPU route's verdict", lambda: load_of(house, "cpu"))
    assert twin["predicted"]["total_bytes"] == plan["standby"]["total_bytes"]
    choice = plan["choice"]
    if verdict == "redirect":
        load = wait_for("the device's verdict", lambda: load_of(house, "gpu"))
        assert load["step"] == "redirect"
        assert load["reason"].split(" Its requests")[0] == choice["reason"].split(" Its requests")[0]
        return
    route = "hybrid" if verdict == "offload" else "gpu"
    load = wait_for("the device's verdict", lambda: load_of(house, route))
    assert load["predicted"]["total_bytes"] == choice["total_bytes"]
    assert load["predicted_host"]["total_bytes"] == choice["host_total_bytes"]
    assert (load["context_tokens"], load["slots"]) == (choice["options"]["context_tokens"], choice["options"]["slots"])
    assert load["step"] == (verdict if verdict != "offload" else "admit"), "a part that fits is admitted as such"
