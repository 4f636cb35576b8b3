"""Fetching: pinned files only, whole or not at all, once for all clones. npm and pip are small stand-in programs."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from relevo.core.errors import LibraryError, ModelFileError
from relevo.setup import demo, libraries
from relevo.setup.__main__ import main
from relevo.setup.cache import CacheError, damaged_files, ensure_entry, find_entry
from relevo.setup.machine import Machine
from relevo.setup.packages import FetchError, NpmPackage, check_integrity, fetch, run_tool, unpack_tar, unpack_zip
from relevo.setup.progress import Lines, Silent, make_progress, size


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("RELEVO_CACHE", str(folder))
    return folder


def _tar(path: Path, files: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return path


def _integrity(path: Path) -> str:
    return "sha512-" + base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()


def _npm_that(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / "npm"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


# --- npm


def test_a_package_is_fetched_checked_and_its_wanted_members_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = _tar(tmp_path / "x.tgz", {"package/bins/a/libx.so": b"lib", "package/index.js": b"code"})
    _npm_that(tmp_path / "bin", f'for last; do :; done; cp {archive} "$last/x-1.0.tgz"', monkeypatch)
    package = NpmPackage("x", "1.0", _integrity(archive), 10, ("package/bins/a/lib*.so",))
    into = tmp_path / "into"
    into.mkdir()
    fetch(package, into, Silent())
    assert [p.name for p in into.iterdir()] == ["libx.so"]

    _tar(archive, {"package/bins/a/libx.so": b"lib, but another"})
    with pytest.raises(FetchError, match="not the pinned file"):
        fetch(package, into, Silent())


def test_a_tool_that_fails_ends_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _npm_that(tmp_path / "bin", 'echo "npm error network: no such host" >&2; echo more; exit 7', monkeypatch)
    with pytest.raises(FetchError, match=r"npm could not fetch x 1\.0: npm error network: no such host") as e:
        fetch(NpmPackage("x", "1.0", "sha512-", 10, ("*",)), tmp_path, Silent())
    assert "make setup" in e.value.message and "\n" not in e.value.message


def test_a_tool_that_hangs_is_ended() -> None:
    with pytest.raises(FetchError, match="took longer than"):
        run_tool([sys.executable, "-c", "import time; time.sleep(60)"], what="It failed", timeout_s=0.3)
    lines: list[str] = []
    run_tool([sys.executable, "-c", "print('[3/4] x')"], what="It failed", on_line=lines.append)
    assert lines == ["[3/4] x"]


# --- unpacking


def test_nothing_is_unpacked_outside_the_folder(tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    archive = _tar(
        tmp_path / "x.tgz", {"package/../../lib1.so": b"1", "/etc/lib2.so": b"2"}, {"lib3.so": "/etc/passwd"}
    )
    unpack_tar(archive, into, ("*.so",), "x")
    assert sorted(p.name for p in into.iterdir()) == ["lib1.so", "lib2.so"]  # by last name; the link is no file
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("../../lib4.so", b"4")
    unpack_zip(wheel, into, ("*lib4.so",), "x")
    assert (into / "lib4.so").read_bytes() == b"4"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["into", "x.tgz", "x.whl"]


def test_a_package_that_lacks_what_is_wanted_or_is_broken_is_refused(tmp_path: Path) -> None:
    archive = _tar(tmp_path / "x.tgz", {"package/a/libx.so": b"1", "package/b/libx.so": b"2"})
    with pytest.raises(FetchError, match=r"does not hold package/c/\*"):
        unpack_tar(archive, tmp_path, ("package/c/*",), "x")
    with pytest.raises(FetchError, match="two wanted files of the same name"):
        unpack_tar(archive, tmp_path, ("package/*",), "x")
    archive.write_bytes(archive.read_bytes()[:40])
    with pytest.raises(FetchError, match="cannot be unpacked"):
        unpack_tar(archive, tmp_path, ("package/*",), "x")
    with pytest.raises(FetchError, match="must be a sha512"):
        check_integrity(archive, "sha1-abc", "x")


# --- the cache


def test_an_entry_is_filled_once_and_whole_or_not_at_all() -> None:
    filled = []

    def fill(folder: Path) -> None:
        filled.append(folder)
        (folder / "a").write_bytes(b"12345")

    def broken(folder: Path) -> None:
        (folder / "a").write_bytes(b"1")
        raise FetchError("no")

    with pytest.raises(FetchError):
        ensure_entry("things/one", broken)
    assert find_entry("things/one") is None
    folder = ensure_entry("things/one", fill)
    assert ensure_entry("things/one", fill) == folder == find_entry("things/one")
    assert len(filled) == 1 and damaged_files("things/one") == []
    (folder / "a").write_bytes(b"54321")
    assert damaged_files("things/one") == ["a"]
    (folder / "a").write_bytes(b"1")  # cut short: not complete any more, so it is fetched again
    assert find_entry("things/one") is None
    ensure_entry("things/one", fill)
    assert len(filled) == 2


def test_what_an_interrupted_run_left_behind_is_thrown_away(cache: Path) -> None:
    left = cache / "things" / ".one.partial"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    folder = ensure_entry("things/one", lambda into: (into / "a").write_bytes(b"1") and None)
    assert sorted(p.name for p in folder.iterdir()) == ["a", "contents.json"]
    assert not left.exists()


def test_two_runs_at_once_fetch_once() -> None:
    started, go, waited = threading.Event(), threading.Event(), threading.Event()
    fills: list[str] = []

    def fill(folder: Path) -> None:
        fills.append("fill")
        (folder / "a").write_bytes(b"1")
        started.set()
        go.wait(10)

    first = threading.Thread(target=ensure_entry, args=("things/one", fill))
    first.start()
    assert started.wait(10)
    second = threading.Thread(target=ensure_entry, args=("things/one", fill, waited.set))
    second.start()
    assert waited.wait(10)
    go.set()
    first.join(10)
    second.join(10)
    assert fills == ["fill"]


def test_a_cache_that_cannot_be_used_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("RELEVO_CACHE", str(file))
    with pytest.raises(CacheError, match="RELEVO_CACHE names another"):
        ensure_entry("things/one", lambda _into: None)


# --- finding


def test_what_is_not_fetched_names_the_way_to_get_it() -> None:
    with pytest.raises(ModelFileError, match="make setup"):
        demo.find()
    with pytest.raises(LibraryError, match="make setup"):
        libraries.find(None)


def test_libraries_are_found_in_the_order_configured_fetched_own_build(cache: Path, tmp_path: Path) -> None:
    machine = Machine("linux", "x86_64", (2, 36), nvidia_driver=590)

    def fill(into: Path) -> None:
        (into / "libllama.so").write_bytes(b"")

    own = ensure_entry("libraries/own-build-0.3.36", fill)
    assert libraries.find(None, machine) == own
    plain = ensure_entry(libraries.SETS["linux-x64"].key, fill)
    assert libraries.find(None, machine) == plain
    cuda = ensure_entry(libraries.SETS["linux-x64-cuda"].key, fill)
    assert libraries.find(None, machine) == cuda
    assert libraries.find(str(own), machine) == own
    with pytest.raises(LibraryError, match="no libllama in it"):
        libraries.find(str(tmp_path), machine)


# --- the program


def test_the_program_ends_with_a_sentence_and_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _npm_that(tmp_path / "bin", "echo npm error code E404 >&2; exit 1", monkeypatch)
    assert main(["--set", "linux-x64", "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: npm could not fetch") and "E404" in err
    ensure_entry(libraries.SETS["linux-x64"].key, lambda into: (into / "libllama.so").write_bytes(b"") and None)
    assert main(["--set", "linux-x64"]) == 0
    assert "linux-x64-v0.5.0" in capsys.readouterr().out


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make_progress()
    assert isinstance(progress, Lines)
    with progress.step("Fetching it (11 MB)") as news:
        news("half")
    assert capsys.readouterr().out.splitlines()[0] == "Fetching it (11 MB) ..."
    assert size(98_362_432) == "98 MB" and size(4_100_000_000) == "4.1 GB"


def test_the_verbs_are_explained_and_an_old_python_is_refused(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    shown = subprocess.run(["make", "-s", "-C", str(root), "help"], capture_output=True, text=True, check=True).stdout
    for verb in ("setup", "demo", "test", "lint", "bench", "proof"):
        assert f"make {verb} " in shown
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    old.chmod(0o755)
    made = subprocess.run(
        ["make", "-s", "-C", str(root), "setup", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode != 0 and "Python 3.11 or newer is needed" in made.stderr and "3.9.2" in made.stderr
