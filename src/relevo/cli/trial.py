"""One real answer from a model, by a service of its own in a folder of its own, before anything is configured."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relevo.core.errors import StartupError

if TYPE_CHECKING:
    from relevo.config import ModelConfig

PROMPT = "What is the capital of France? Answer in one sentence."
_ANSWER_TOKENS = 48
_CONTEXT_TOKENS = 1024
_START_S = 180.0
_READ_BYTES_A_S = 50e6  # a slow disk: what the first reading of a large file may take
_ANSWER_S = 300.0
_STOP_S = 10.0
_POLL_S = 0.05


class TrialFailed(StartupError):
    """The model was tried and gave no answer."""

    code = "trial_failed"


@dataclass(frozen=True, slots=True)
class Trial:
    """What the model said, and how fast."""

    answer: str
    output_tokens: int
    load_s: float
    first_token_s: float
    tokens_per_s: float | None


def try_model(name: str, model: ModelConfig, *, libraries: str | None, chat: bool) -> Trial:
    """Start the model alone on the CPU, ask it one thing, stop it. Raises TrialFailed with the cause."""
    with tempfile.TemporaryDirectory(prefix="relevo-trial-") as folder:
        place = Path(folder)
        (place / "trial.toml").write_text(_config_text(name, model, libraries), encoding="utf-8")
        started = time.monotonic()
        with _service(place) as process:
            url = _wait_ready(process, place, started + _START_S + Path(model.path).stat().st_size / _READ_BYTES_A_S)
            load_s = time.monotonic() - started
            return _ask(url, name, chat=chat, load_s=load_s, place=place)


def _config_text(name: str, model: ModelConfig, libraries: str | None) -> str:
    import tomlkit

    fields: dict[str, Any] = {
        "path": str(Path(model.path).absolute()),
        "device": "",
        "context_tokens": min(model.context_tokens, _CONTEXT_TOKENS),
        "slots": 1,
    }
    if model.chat_template is not None:
        fields["chat_template"] = model.chat_template
    engine = {} if libraries is None else {"libraries": libraries}
    return tomlkit.dumps({"server": {"port": 0}, "engine": engine, "models": {name: fields}})


@contextlib.contextmanager
def _service(place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`relevo serve` as a child; gone when this is left, however it is left."""
    command = [sys.executable, "-m", "relevo", "serve"]
    command += ["--config", str(place / "trial.toml"), "--state", str(place / "state")]
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], place: Path, until: float) -> str:
    """The address, once a route serves."""
    import httpx2

    from relevo.journal.folder import read_holder

    while time.monotonic() < until:
        if process.poll() is not None:
            raise TrialFailed(f"The model did not start: {_last_line(place)}")
        with contextlib.suppress(httpx2.HTTPError):
            holder = read_holder(place / "state")
            url = None if holder is None else holder.address
            if url is not None and _serves(httpx2.get(f"{url}/relevo/v1/status", timeout=5.0, trust_env=False).json()):
                return url
        time.sleep(_POLL_S)
    raise TrialFailed(f"The model did not become ready in time: {_last_line(place)}")


def _serves(status: dict[str, Any]) -> bool:
    """Whether a route serves. Raises TrialFailed as soon as it is clear that none will.

    A worker that died once would only die again, and one that the ladder refuses is not started at all.
    """
    if status.get("state") in ("ok", "degraded"):
        return True
    for replica in status.get("replicas") or []:
        death, load = replica.get("last_death"), replica.get("load") or {}
        if death:
            raise TrialFailed(f"The model did not start: {death.get('cause')}")
        if load.get("step") == "reject":
            raise TrialFailed(f"The model cannot be started: {load.get('reason')}")
    return False


def _ask(url: str, name: str, *, chat: bool, load_s: float, place: Path) -> Trial:
    """One streamed answer, timed."""
    import httpx2

    body: dict[str, Any] = {
        "model": name, "stream": True, "stream_options": {"include_usage": True},
        "max_tokens": _ANSWER_TOKENS, "temperature": 0,
    }  # fmt: skip
    body |= {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": "The capital of France is"}
    text: list[str] = []
    output_tokens, first = 0, None
    asked = last = time.monotonic()
    try:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        with httpx2.stream("POST", url + path, json=body, timeout=_ANSWER_S, trust_env=False) as answer:
            if answer.status_code != 200:
                raise TrialFailed(f"The model gave no answer: {_message(json.loads(answer.read()))}")
            for chunk in _chunks(answer.iter_lines()):
                if "error" in chunk:
                    raise TrialFailed(f"The model gave no answer: {_message(chunk)}")
                for choice in chunk.get("choices") or []:
                    piece = (choice.get("delta") or {}).get("content") if chat else choice.get("text")
                    if piece:
                        last = time.monotonic()
                        first = first or last
                        text.append(piece)
                output_tokens = (chunk.get("usage") or {}).get("completion_tokens", output_tokens)
    except (httpx2.HTTPError, ValueError) as e:
        raise TrialFailed(f"The model gave no answer ({type(e).__name__}): {_last_line(place)}") from None
    if first is None:
        raise TrialFailed("The model answered without a word. Is it a chat model?")
    speed = (output_tokens - 1) / (last - first) if output_tokens > 1 and last > first else None
    return Trial("".join(text).strip(), output_tokens, load_s, first - asked, speed)


def _chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error or "no reason given")


def _last_line(place: Path) -> str:
    """What the service said last."""
    try:
        lines = (place / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it said nothing."
