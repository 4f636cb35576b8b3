"""Memory is weighed, leased and given back: real services on emulated devices that are too small, pressed, or lie."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from relevo.devices.faults import Faults, clear, write
from relevo.setup.demo import find

from .house import House, assert_idle, wait_for

MIB = 2**20
Build = Callable[..., House]


def config(total_mib: int, models: dict[str, str], device: str = "") -> str:
    """Models of the demo file on one emulated device; each with its own lines."""
    tables = [
        f'[models.{name}]\npath = "{find()}"\ncontext_tokens = 2048\nslots = 2\nflash_attention = false\n{lines}'
        for name, lines in models.items()
    ]
    return f'[devices.gpu0]\nkind = "emulated"\ntotal_bytes = {total_mib * MIB}\n{device}\n' + "\n".join(tables)


def ask(house: House, model: str, tokens: int = 4, **more: Any) -> httpx2.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Say something."}], "max_tokens": tokens}
    return house.http.post("/v1/chat/completions", json={**body, "ignore_eos": True, "temperature": 0, **more})


def replica(house: House, model: str, route: str) -> dict[str, Any]:
    return next(r for r in house.status()["replicas"] if (r["model"], r["route"]) == (model, route))


def device(house: House) -> dict[str, Any]:
    return next(d for d in house.status()["devices"] if d["name"] == "gpu0")


def folder(house: House) -> Path:
    return house.state / "devices" / "gpu0"


def serving(house: House, model: str, route: str) -> Callable[[], bool]:
    return lambda: any(
        (r["model"], r["route"], r["state"]) == (model, route, "serving") for r in house.status()["replicas"]
    )


FIXED = "reduce = []\noffload = false\n"


def test_of_two_models_that_do_not_fit_together_the_idle_one_gives_way_to_the_one_that_is_asked_for(
    build: Build,
) -> None:
    house = build("--host", "127.0.0.1", config=config(600, {"first": FIXED, "second": FIXED})).start(both_routes=False)
    wait_for("the first model to be on the device", serving(house, "first", "gpu"))
    wait_for("the second one's twin to serve", serving(house, "second", "cpu"))
    wait_for(
        "a refusal with its numbers",
        lambda: (r := replica(house, "second", "gpu")["reason"] or "") and "needs" in r and "available" in r,
    )
    answer = ask(house, "second")
    assert answer.status_code == 200 and answer.headers["x-relevo-route"] == "cpu"
    assert "needs" in answer.json()["relevo"]["reason"], "whoever is redirected is told why"
    wait_for("the second model to be loaded when the first is idle", serving(house, "second", "gpu"), 40)
    assert not serving(house, "first", "gpu")()
    assert "gave its memory to second/gpu" in replica(house, "first", "gpu")["last_death"]["cause"]
    assert ask(house, "second").headers["x-relevo-route"] == "gpu"
    holders = [lease["holder"] for lease in device(house)["leases"]]
    assert holders == ["second/gpu"]
    assert_idle(house)


def test_a_model_that_does_not_fit_whole_is_loaded_with_less_and_says_what_it_gave_up(build: Build) -> None:
    house = build("--host", "127.0.0.1", config=config(378, {"m": "least_context_tokens = 512\n"})).start()
    load = replica(house, "m", "gpu")["load"]
    assert load["step"] == "reduce" and load["changes"]
    assert load["context_tokens"] < 2048 and load["predicted"]["total_bytes"] <= 378 * MIB * 0.95
    body = {"model": "m", "prompt": "Once", "max_tokens": 1500, "stream": True}
    with house.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["x-relevo-route"] == "cpu", "a request for the context it gave up goes to the twin"
        record = house.record(answer.headers["x-request-id"])
    assert "does not fit the gpu route" in record["relevo"]["reason"]


def test_layers_stay_in_ram_when_not_all_fit_and_the_route_says_hybrid(build: Build) -> None:
    house = build("--host", "127.0.0.1", config=config(385, {"m": "reduce = []\n"})).start(both_routes=False)
    wait_for("the hybrid route to serve", serving(house, "m", "hybrid"), 40)
    answer = ask(house, "m")
    assert answer.headers["x-relevo-route"] == "hybrid" and answer.headers["x-relevo-degraded"] == "true"
    leases = {d["name"]: [lease["holder"] for lease in d["leases"]] for d in house.status()["devices"]}
    assert "m/hybrid" in leases["gpu0"] and "m/hybrid" in leases["host"], "both parts are leased"


def test_a_neighbour_that_takes_the_headroom_is_given_memory_back_and_nothing_is_lost(build: Build) -> None:
    house = build("--host", "127.0.0.1", config=config(1024, {"m": "offload = false\n"}, "yield_s = 2.0")).start()
    assert ask(house, "m").headers["x-relevo-route"] == "gpu"
    write(folder(house), Faults(external_bytes=700 * MIB))
    began = time.monotonic()
    wait_for("the worker to give its memory back", lambda: not device(house)["leases"], 15)
    assert time.monotonic() - began < 6, "within the stated time"
    status = device(house)
    assert status["external_bytes"] >= 690 * MIB
    answer = ask(house, "m")
    assert answer.status_code == 200 and answer.headers["x-relevo-route"] == "cpu"
    assert answer.json()["relevo"]["reason"]
    clear(folder(house))
    wait_for("the GPU to be used again", serving(house, "m", "gpu"), 60)
    assert ask(house, "m").headers["x-relevo-route"] == "gpu"
    assert_idle(house)


def test_a_device_with_the_bytes_but_not_the_block_is_not_loaded(build: Build) -> None:
    house = build("--host", "127.0.0.1", config=config(1024, {"m": FIXED}))
    folder(house).mkdir(parents=True)
    write(folder(house), Faults(largest_block_bytes=16 * MIB))
    house.start(both_routes=False)
    wait_for("the twin to serve", serving(house, "m", "cpu"))
    wait_for("the refusal", lambda: "one piece" in (replica(house, "m", "gpu")["reason"] or ""), 20)
    assert ask(house, "m").headers["x-relevo-route"] == "cpu"
    clear(folder(house))
    wait_for("the GPU to be used", serving(house, "m", "gpu"), 30)


def test_a_twin_that_may_rest_rests_with_its_memory_leased_and_wakes_when_it_is_needed(build: Build) -> None:
    lines = 'offload = false\nstandby = "mapped"\nrest_after_s = 1.0\n'
    house = build("--host", "127.0.0.1", config=config(1024, {"m": lines})).start(both_routes=False)
    wait_for("the GPU to serve", serving(house, "m", "gpu"))
    wait_for("the twin to rest", lambda: replica(house, "m", "cpu")["load"]["posture"] == "resting", 20)
    host = next(d for d in house.status()["devices"] if d["name"] == "host")
    assert [lease["holder"] for lease in host["leases"]] == ["m/cpu"], "its claim stays"
    assert house.status()["state"] == "ok"
    assert ask(house, "m").json()["relevo"]["standby"]["route"] == "cpu", "it counts as the way out while it rests"
    write(folder(house), Faults(lost=True))
    wait_for("the GPU worker to be gone", lambda: replica(house, "m", "gpu")["state"] != "serving")
    assert house.http.get("/ready").status_code == 200, "whoever asks before sending must not be sent away"
    answer = ask(house, "m")
    assert answer.status_code == 200 and answer.headers["x-relevo-route"] == "cpu"
    assert replica(house, "m", "cpu")["load"]["posture"] == "wanted"
    assert_idle(house)


def test_an_allocation_that_fails_although_it_was_admitted_is_redirected_and_remembered(build: Build) -> None:
    house = build("--host", "127.0.0.1", config=config(600, {"m": FIXED}))
    folder(house).mkdir(parents=True)
    write(folder(house), Faults(external_bytes=480 * MIB, all_free=True))  # the device lies: a neighbour is there
    house.start(both_routes=False)
    wait_for("the load to have failed", lambda: replica(house, "m", "gpu")["last_death"], 30)
    assert replica(house, "m", "gpu")["last_death"]["kind"] == "allocation"
    answer = ask(house, "m")
    assert answer.status_code == 200 and answer.headers["x-relevo-route"] == "cpu", "the client sees no error"
    predicted = wait_for(
        "the next load to be weighed higher",
        lambda: (p := replica(house, "m", "gpu")["load"]["predicted"]).get("fragmentation_bytes") and p,
        30,
    )
    assert predicted["fragmentation_bytes"] >= 64 * MIB
    clear(folder(house))
    assert ask(house, "m").status_code == 200
    assert_idle(house)


def test_a_load_that_was_reduced_is_loaded_in_full_once_there_is_room_for_it(build: Build) -> None:
    house = build("--host", "127.0.0.1", config=config(700, {"m": "least_context_tokens = 512\noffload = false\n"}))
    folder(house).mkdir(parents=True)
    write(folder(house), Faults(external_bytes=305 * MIB))
    house.start()
    assert replica(house, "m", "gpu")["load"]["step"] == "reduce"
    clear(folder(house))
    full = wait_for(
        "the whole context to be back",
        lambda: (r := replica(house, "m", "gpu"))["state"] == "serving" and r["load"]["context_tokens"] == 2048 and r,
        60,
    )
    assert full["load"]["step"] == "admit" and not full["load"]["changes"]
    assert ask(house, "m").headers["x-relevo-route"] == "gpu"


def assert_leases_are_of_the_living(house: House) -> None:
    """After all is quiet: no lease is under way, each has its worker, and the sums agree."""

    def quiet() -> bool:
        status = house.status()
        serving = {r["name"] for r in status["replicas"] if r["state"] == "serving"}
        return all(
            d["returning_bytes"] == 0
            and d["leased_bytes"] == sum(lease["bytes"] for lease in d["leases"])
            and all(lease["state"] == "settled" and lease["holder"] in serving for lease in d["leases"])
            for d in status["devices"]
        )

    wait_for("the leases to be those of the living", quiet, 15)


def test_a_worker_that_crashed_waits_for_its_own_memory_and_comes_back_as_it_was(build: Build) -> None:
    house = build("--host", "127.0.0.1", config=config(450, {"m": "least_context_tokens = 512\n"})).start()
    house.kill_worker("gpu")
    wait_for("the worker to be back", lambda: replica(house, "m", "gpu")["incarnation"] == 2)
    wait_for("the GPU to serve", serving(house, "m", "gpu"))
    load = replica(house, "m", "gpu")["load"]
    assert (load["step"], load["context_tokens"], load["changes"]) == ("admit", 2048, [])
    assert "m/hybrid" not in house.log.read_text(), "no part of it was loaded in between"
    assert_leases_are_of_the_living(house)


def test_a_neighbour_takes_from_one_idle_model_where_one_is_enough_although_readings_lag(build: Build) -> None:
    house = build("--host", "127.0.0.1", config=config(1100, {"a": FIXED, "b": FIXED})).start()
    wait_for("readings without loads", lambda: all(x["state"] == "settled" for x in device(house)["leases"]))
    free = device(house)["available_bytes"]
    write(folder(house), Faults(external_bytes=free + 60 * MIB, lag_s=1.5))
    wait_for("one to give way", lambda: len(device(house)["leases"]) == 1, 10)
    time.sleep(3.0)
    assert len(device(house)["leases"]) == 1, "the other one's memory was not needed"


def test_a_worker_that_is_killed_while_it_leaves_does_not_keep_the_others_or_mislead(build: Build) -> None:
    lines = "yield_s = 2.0"
    house = build("--host", "127.0.0.1", config=config(1100, {"a": FIXED, "b": FIXED}, lines)).start()
    with ThreadPoolExecutor(2) as callers:
        answers = [callers.submit(ask, house, model, 250) for model in ("a", "b")]
        wait_for("both to run", lambda: all(lane(house, m, "gpu")["running"] for m in ("a", "b")))
        write(folder(house), Faults(external_bytes=device(house)["available_bytes"] + 55 * MIB))
        leaving = wait_for("one to leave", lambda: posture(house, "leaving"), 10)[0]
        assert "ends its work" in leaving["reason"]
        os.kill(leaving["pid"], signal.SIGKILL)
        wait_for("it to be gone", lambda: replica(house, leaving["model"], "gpu")["pid"] is None)
        assert "ends its work" not in replica(house, leaving["model"], "gpu")["reason"]
        write(folder(house), Faults(external_bytes=900 * MIB))
        wait_for("the other to give its memory back, too", lambda: not device(house)["leases"], 20)
        assert [answer.result().status_code for answer in answers] == [200, 200]
    assert_leases_are_of_the_living(house)


def test_a_model_whose_file_is_broken_does_not_close_the_devices_of_the_others(build: Build, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    content = bytearray(Path(find()).read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2 * MIB] = b"\xff" * (2 * MIB)  # scales that are no numbers
    broken.write_bytes(content)
    text = config(1100, {"good": FIXED, "broken": FIXED})
    good, rest = text.split("[models.broken]")
    house = build("--host", "127.0.0.1", config=f"{good}[models.broken]{rest.replace(str(find()), str(broken))}")
    house.start(both_routes=False)
    for route in ("cpu", "gpu"):
        wait_for("three failures", lambda r=route: replica(house, "broken", r)["incarnation"] > 3, 30)
    assert "not finite" in replica(house, "broken", "cpu")["last_death"]["cause"]
    assert {d["breaker"]["state"] for d in house.status()["devices"]} == {"closed"}
    assert ask(house, "good").headers["x-relevo-route"] == "gpu"


def lane(house: House, model: str, route: str) -> dict[str, Any]:
    return next(x for x in house.status()["lanes"] if (x["model"], x["route"]) == (model, route))


def posture(house: House, name: str) -> list[dict[str, Any]]:
    return [r for r in house.status()["replicas"] if r["load"] and r["load"]["posture"] == name]
