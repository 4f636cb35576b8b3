"""What `relevo doctor` looks at: every link of the chain, what was found, and what would mend it.

Nothing is changed. Each check runs in a thread of its own with a time limit, so a hanging driver or disk is a
finding and not a hanging doctor.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

from relevo.config import Config, is_loopback
from relevo.core.errors import RelevoError
from relevo.models.gguf import read_header
from relevo.setup import demo, libraries
from relevo.setup.cache import cache_folder
from relevo.setup.machine import Machine, look_at_machine
from relevo.setup.progress import size

CHECK_TIMEOUT_S: Final = 20.0
_INSPECT_TIMEOUT_S: Final = 15.0
_OLDEST_SQLITE: Final = (3, 51, 3)
_WITHDRAWN_SQLITE: Final = (3, 52, 0)
_STATE_FREE_BYTES: Final = 1 << 30
_CACHE_FREE_BYTES: Final = 1 << 30
_PROCESS_BYTES: Final = 512 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `ok` None: it could not be told, and why stands in `found`."""

    name: str
    ok: bool | None
    found: str
    fix: str | None = None


def run_checks(config: Config, state_dir: Path, port: int) -> list[Check]:
    """Every check, in the order in which things depend on each other. Never raises, and never hangs."""
    todo: list[tuple[str, Callable[[], list[Check]]]] = [
        ("Python", check_python),
        ("SQLite", check_sqlite),
        ("memory", lambda: check_memory(config)),
        ("card", lambda: check_card(look_at_machine())),
        ("libraries", lambda: check_engine(config, look_at_machine())),
        ("model", lambda: check_models(config)),
        ("state folder", lambda: check_state_folder(state_dir)),
        ("disk", lambda: check_disk(state_dir)),
        ("port", lambda: check_port(config.server.host, port)),
        ("keys", lambda: check_keys(config.server.host, state_dir)),
    ]
    runs = [_Run(name, check) for name, check in todo]
    deadline = time.monotonic() + CHECK_TIMEOUT_S
    return [finding for run in runs for finding in run.result(deadline)]


class _Run:
    """A check under way in a daemon thread: one that hangs does not keep the program from ending."""

    def __init__(self, name: str, check: Callable[[], list[Check]]) -> None:
        self._name = name
        self._check = check
        self._found: list[Check] | None = None
        self._thread = threading.Thread(target=self._run, name=f"check-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._check()
        except Exception as e:  # a check that breaks is a finding
            self._found = [Check(self._name, None, f"could not be checked: {type(e).__name__}: {e}")]

    def result(self, deadline: float) -> list[Check]:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._found is None:
            return [Check(self._name, None, f"did not answer within {CHECK_TIMEOUT_S:.0f} s: something hangs")]
        return self._found


def check_python() -> list[Check]:
    """3.11 or newer."""
    found = ".".join(str(part) for part in sys.version_info[:3])
    ok = sys.version_info >= (3, 11)
    return [Check("Python", ok, found, None if ok else "Relevo needs Python 3.11 or newer.")]


def check_sqlite(version: str | None = None) -> list[Check]:
    """A version without the known faults of the write-ahead log. `version` None: the one that is used."""
    if version is None:
        import apsw

        version = apsw.sqlite_lib_version()
    numbers = tuple(int(part) for part in version.split(".")[:3])
    ok = numbers >= _OLDEST_SQLITE and numbers != _WITHDRAWN_SQLITE
    return [Check("SQLite", ok, version, None if ok else "Older ones can lose commits. Run `make setup` again.")]


def check_memory(config: Config) -> list[Check]:
    """Whether the CPU routes of all models fit beside what runs now."""
    memory = psutil.virtual_memory()
    need = sum(_file_bytes(model.path) + _PROCESS_BYTES for model in config.models.values())
    found = f"{size(memory.available)} of {size(memory.total)} available"
    if need <= memory.available:
        return [Check("memory", True, found)]
    return [
        Check("memory", False, f"{found}; the CPU routes need about {size(need)}", "Close programs, or serve less.")
    ]


def check_card(machine: Machine) -> list[Check]:
    """The graphics card and its driver, as far as the kernel tells."""
    cards = ", ".join(sorted(machine.cards)) or ("nvidia" if machine.nvidia_driver else "")
    if not cards:
        return [Check("card", True, "none seen: the CPU serves, or an emulated accelerator")]
    checks = [Check("card", True, cards)]
    if "nvidia" in cards:
        checks.append(_check_nvidia_driver(machine.nvidia_driver))
    if machine.cards & {"amd", "intel"}:
        fix = (
            None if machine.vulkan else "Install the Vulkan loader and driver (Debian: libvulkan1 mesa-vulkan-drivers)."
        )
        found = "Vulkan loader is installed" if machine.vulkan else "no Vulkan loader"
        checks.append(Check("driver", machine.vulkan, found, fix))
    return checks


def _check_nvidia_driver(version: int | None) -> Check:
    if version is None:
        fix = "Install NVIDIA's driver, 525 or newer, then restart; after an update of the driver, restart too."
        return Check("driver", False, "an NVIDIA card, but its driver is not loaded", fix)
    if version < libraries.OLDEST_NVIDIA_DRIVER:
        fix = f"The libraries need driver {libraries.OLDEST_NVIDIA_DRIVER} or newer."
        return Check("driver", False, f"NVIDIA driver {version}", fix)
    return Check("driver", True, f"NVIDIA driver {version}")


def check_engine(config: Config, machine: Machine) -> list[Check]:
    """The libraries, whether they are the release the binding knows, and what they see."""
    try:
        folder = libraries.find(config.engine.libraries, machine)
    except RelevoError as e:
        return [Check("libraries", False, e.message, "make setup")]
    try:
        facts = _inspect(folder)
    except subprocess.TimeoutExpired:
        fix = "A driver may hang: restart the machine, or name libraries without GPU code under engine.libraries."
        return [Check("libraries", None, f"{folder}: no answer within {_INSPECT_TIMEOUT_S:.0f} s", fix)]
    except (OSError, ValueError) as e:
        return [Check("libraries", False, f"{folder}: could not be loaded: {e}", "make setup, or docs/libraries.md")]
    if "error" in facts:
        name = "engine layout" if facts.get("code") == "layout" else "libraries"
        fix = f"Use llama.cpp {libraries.ENGINE_RELEASE}: see docs/libraries.md."
        return [Check(name, False, str(facts["error"]), fix)]
    checks = [
        Check("libraries", True, str(folder)),
        Check("engine layout", True, f"{facts['engine']}, as the binding expects"),
        Check("CPU library", True, str(facts.get("cpu_library") or "linked in")),
    ]
    return [*checks, _check_accelerators(config, machine, facts)]


def _check_accelerators(config: Config, machine: Machine, facts: dict[str, Any]) -> Check:
    seen = [f"{d['name']}: {d['description']}" for d in facts["devices"] if d["kind"] in ("gpu", "igpu")]
    if seen:
        return Check("accelerator", True, "; ".join(seen))
    used = {model.device for model in config.models.values()}
    real = [name for name, device in config.devices.items() if device.kind != "emulated" and name in used]
    if real or machine.cards or machine.nvidia_driver:
        named = f", but {', '.join(real)} is configured" if real else ", though there is a card"
        fix = "Run `make setup` again so that libraries for the card are fetched; docs/libraries.md has the other ways."
        return Check("accelerator", not real, f"the engine sees none{named}", fix)
    return Check("accelerator", True, "the engine sees none; none is configured")


def _inspect(folder: Path) -> dict[str, Any]:
    """The facts of the inspect program. Raises TimeoutExpired, OSError, ValueError."""
    done = subprocess.run(
        [sys.executable, "-I", "-m", "relevo.workers.llama.inspect", "--libraries", str(folder), "--json"],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=_INSPECT_TIMEOUT_S,
        check=False,
    )
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    try:
        facts = json.loads(lines[-1])
    except (ValueError, IndexError):
        words = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        raise ValueError(f"exit code {done.returncode}, {words[-1][:200]}") from None
    if not isinstance(facts, dict):
        raise ValueError("its answer is not understood")
    return facts


def check_models(config: Config) -> list[Check]:
    """Every configured model's file; with none configured, the demo model's."""
    if not config.models:
        try:
            return [Check("model", True, f"none configured; the demo model is {demo.find()}")]
        except RelevoError as e:
            return [Check("model", False, e.message, "make setup")]
    return [_check_model(name, model.path) for name, model in config.models.items()]


def _check_model(name: str, path: str) -> Check:
    try:
        header = read_header(Path(path).expanduser())
    except RelevoError as e:
        return Check(f"model {name}", False, e.message, f"Correct models.{name}.path, or fetch the file again.")
    return Check(f"model {name}", True, f"{header.architecture}, {header.quantization}, {size(header.file_bytes)}")


def check_state_folder(folder: Path) -> list[Check]:
    """There, or makeable; ours; writable; closed to others."""
    name = "state folder"
    if not folder.exists():
        parent = next(p for p in folder.absolute().parents if p.exists())
        ok = os.access(parent, os.W_OK | os.X_OK)
        fix = None if ok else f"Choose another with --state, or make {parent} writable."
        return [Check(name, ok, f"{folder} will be made at the first start" if ok else f"{parent} is read-only", fix)]
    if not folder.is_dir():
        return [Check(name, False, f"{folder} is not a folder", "Choose another with --state.")]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [Check(name, False, f"{folder} cannot be written", f"chown it to this user, or chmod u+rwx {folder}")]
    if os.name == "posix" and folder.stat().st_mode & 0o077:
        return [Check(name, False, f"{folder} is open to other users; it holds prompts", f"chmod 700 {folder}")]
    return [Check(name, True, str(folder))]


def check_disk(state_dir: Path) -> list[Check]:
    """Room for the journal, and for what is fetched."""
    return [
        _check_room("disk (state)", state_dir, _STATE_FREE_BYTES),
        _check_room("disk (cache)", cache_folder(), _CACHE_FREE_BYTES),
    ]


def _check_room(name: str, folder: Path, wanted_bytes: int) -> Check:
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    ok = free >= wanted_bytes
    fix = None if ok else f"Free some space on the disk of {there}: {size(wanted_bytes)} should be free."
    return Check(name, ok, f"{size(free)} free on the disk of {there}", fix)


def check_port(host: str, port: int) -> list[Check]:
    """Free, or taken by a Relevo."""
    name = f"port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            if os.name == "posix":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)  # on Linux, only this is refused when another listens there
    except OSError as e:
        if e.errno == errno.EADDRINUSE and _is_relevo(host, port):
            return [Check(name, True, "a Relevo answers there")]
        if e.errno == errno.EADDRINUSE:
            return [Check(name, False, "another program listens there", "Stop it, or choose another with --port.")]
        return [Check(name, False, f"{host}: {e.strerror or e}", "Correct server.host and server.port.")]
    return [Check(name, True, f"free on {host}")]


def _is_relevo(host: str, port: int) -> bool:
    import http.client

    everywhere = host in ("", "::") or host.strip("0.") == ""
    connection = http.client.HTTPConnection("127.0.0.1" if everywhere else host, port, timeout=2)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        body = json.loads(answer.read(4096))
        return answer.status == 200 and isinstance(body, dict) and body.get("status") == "ok"
    except (OSError, ValueError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def check_keys(host: str, state_dir: Path) -> list[Check]:
    """Who may call: this machine only, or whoever holds a key."""
    keys = sum(1 for _ in _working_keys(state_dir / "keys.json"))
    held = f"{keys} key{'' if keys == 1 else 's'}" if keys else "no key"
    if is_loopback(host):
        return [Check("keys", True, f"{held}; only this machine can reach {host}")]
    if keys:
        return [Check("keys", True, f"{held}; every caller on {host} needs one")]
    fix = "Make one with `relevo keys create NAME`, or listen on 127.0.0.1."
    return [Check("keys", False, f"no key, and {host} can be reached from the network: it will not start", fix)]


def _working_keys(path: Path) -> Iterator[Any]:
    try:
        raw = json.loads(path.read_bytes())
        yield from (key for key in raw["keys"] if key.get("revoked") is None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return


def _file_bytes(path: str) -> int:
    try:
        return Path(path).expanduser().stat().st_size
    except OSError:
        return 0
