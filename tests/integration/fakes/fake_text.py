"""A small text process with bad habits, which come in the text it is asked to count. Tokens are the text's words.

Habits: `die`, `die once` (the file FAKE_NOTE remembers), `burn`, `hang`, `slow`, `stop` (SIGSTOP), `refuse CODE`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
import time
from pathlib import Path

from relevo.core import events as e
from relevo.models.payload import spill, whole
from relevo.workers.frames import FrameSocket


def beat(wire: FrameSocket) -> None:
    """Heartbeats until the socket is closed."""
    while True:
        try:
            wire.send(e.Heartbeat(0, 0.0, 0, 0))
        except OSError:
            os._exit(0)
        time.sleep(0.1)


def answer(frame: e.Render | e.Tokenize, folder: str | None) -> e.Rendered | e.TextRefused:
    """What the text asks for."""
    frame = whole(frame)
    text = frame.text if isinstance(frame, e.Tokenize) else str(frame.messages[0]["content"])
    note = Path(os.environ["FAKE_NOTE"])
    match text.split()[:3]:
        case ["die", "once", *_] if not note.exists():
            note.touch()
            os._exit(3)
        case ["die", "once", *_]:
            pass
        case ["die", *_]:
            print("this text is deadly", flush=True)
            os._exit(3)
        case ["burn", *_]:
            os.kill(os.getpid(), signal.SIGXCPU)
        case ["hang", *_]:
            time.sleep(600)
        case ["slow", *_]:
            time.sleep(0.4)
        case ["stop", *_]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["refuse", code, *_]:
            return e.TextRefused(frame.call, code, f"Refused for {code}.")
        case _:
            pass
    return spill(e.Rendered(frame.call, [len(w) for w in text.split()], text), folder)


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    wire = FrameSocket(socket.socket(fileno=parser.parse_args().fd))
    start = wire.receive(e.StartText)
    assert start is not None
    if start.path == "/broken":
        wire.send(e.StartFailed("model_file", "The model file /broken is damaged."))
        return
    threading.Thread(target=beat, args=(wire,), daemon=True).start()
    wire.send(e.TextReady(os.getpid(), True, 100, 4096))
    while (frame := wire.receive(e.ToText)) is not None and not isinstance(frame, e.Shutdown):
        wire.send(answer(frame, start.folder))


main()
