"""Answers the calls to a text process, in their order."""

from __future__ import annotations

import os
import threading
import time
from datetime import datetime
from pathlib import Path

from relevo.core.errors import ModelFileError, RelevoError
from relevo.core.events import (
    Heartbeat,
    Render,
    Rendered,
    Shutdown,
    StartFailed,
    StartText,
    TextReady,
    TextRefused,
    Tokenize,
    ToText,
)
from relevo.models.chat_template import MAX_TEMPLATE_BYTES, NO_TEMPLATE, ChatTemplate, RenderRefused, choose_template
from relevo.models.gguf import GgufHeader, read_header
from relevo.models.messages import prepare_messages
from relevo.models.payload import PayloadError, spill, whole
from relevo.workers.frames import FrameError, FrameSocket
from relevo.workers.llama.native import load_native
from relevo.workers.llama.vocabulary import Vocabulary
from relevo.workers.text.guard import Guard, OutOfTime, bound_memory, resident_bytes

HEARTBEAT_S = 0.25
RENDER_S = 5.0
"""Processor time of one rendering. Real templates take milliseconds."""
TOKENIZE_S = 30.0
"""Processor time of one count; it is one native call, so only the kernel can end it, and the process with it."""
HARD_EXTRA_S = 2.0
MEMORY_BYTES = 1024 * 2**20
"""What calls may take beyond what the loaded process holds. Counting takes up to a hundred times the text."""
MIN_TEXT_BYTES = 2**20
MAX_TEXT_BYTES = 8 * 2**20
BYTES_PER_TOKEN = 64
"""No real text is this dense (English has 4 to 5 bytes a token), so more cannot fit in the model's context."""


class TextProcess:
    """One model's text side behind one socket. `run` returns the exit code."""

    def __init__(self, frames: FrameSocket, render_s: float = RENDER_S) -> None:
        self._frames = frames
        self._render_s = render_s
        self._guard = Guard()
        self._calls = 0
        self._call_started: float | None = None
        self._done = threading.Event()

    def run(self) -> int:
        """Load, then answer until Shutdown or the end of the stream.

        Raises FrameError when the other end breaks the protocol, OSError when it is gone.
        """
        start = self._frames.receive(StartText | Shutdown)
        if not isinstance(start, StartText):
            return 0
        heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        heart.start()
        try:
            if not self._load(start):
                return 1
            while True:
                call = self._frames.receive(ToText)
                if call is None or isinstance(call, Shutdown):
                    return 0
                if isinstance(call, StartText):
                    raise FrameError("a second StartText came; one process serves one model.")
                self._call_started = time.monotonic()
                self._frames.send(self._answer(call))
                self._call_started = None
                self._calls += 1
        finally:
            self._done.set()
            heart.join()

    # ------------------------------------------------------------------- loading

    def _load(self, start: StartText) -> bool:
        try:
            ready = self._loaded(start)
        except RelevoError as e:
            code = e.code if e.code in ("library", "layout", "model_file") else "internal"
            self._frames.send(StartFailed(code, e.message))
            return False
        except OutOfTime:
            self._frames.send(StartFailed("model_file", "The model's chat template takes too long on a short chat."))
            return False
        except (MemoryError, OSError, ValueError) as e:
            self._frames.send(StartFailed("internal", f"The text process cannot start: {type(e).__name__}: {e}."))
            return False
        self._frames.send(ready)
        return True

    def _loaded(self, start: StartText) -> TextReady:
        path = Path(start.path)
        header = read_header(path)
        if header.vocabulary_tokens is None or not isinstance(header.metadata.get("tokenizer.ggml.model"), str):
            raise ModelFileError(f"The model file {path} has no vocabulary, so text cannot be counted for it.")
        vocabulary = Vocabulary.load(load_native(Path(start.libraries), backends=False), path)
        self._vocabulary = vocabulary
        self._folder = start.folder
        bound_memory(MEMORY_BYTES)
        with self._guard.limit(self._render_s, self._render_s + HARD_EXTRA_S):
            self._template = self._choose_template(header, start)
        return TextReady(
            pid=os.getpid(),
            has_template=self._template is not None,
            vocabulary_tokens=vocabulary.n_vocab,
            context_trained_tokens=vocabulary.n_ctx_train,
            template_digest=self._template.digest if self._template else None,
            tokenizer_digest=header.tokenizer_digest,
        )

    def _choose_template(self, header: GgufHeader, start: StartText) -> ChatTemplate | None:
        vocabulary = self._vocabulary
        self._bos_text = self._special_text(vocabulary.bos)
        return choose_template(
            header.chat_template,
            None if start.chat_template is None else _template_source(start.chat_template),
            has_token=lambda text: len(vocabulary.tokenize(text, add_special=False, parse_special=True)) == 1,
            bos_token=self._bos_text,
            eos_token=self._special_text(vocabulary.eos),
        )

    def _special_text(self, token: int | None) -> str:
        return "" if token is None else self._vocabulary.piece(token, special=True).decode(errors="replace")

    # ----------------------------------------------------------------- answering

    def _answer(self, call: Render | Tokenize) -> Rendered | TextRefused:
        try:
            rendered = self._render(whole(call)) if isinstance(call, Render) else self._tokenize(whole(call))
            return spill(rendered, self._folder)
        except RenderRefused as e:
            return TextRefused(call.call, e.code, e.message)
        except PayloadError as e:
            return TextRefused(call.call, "too_large", str(e))
        except OutOfTime:
            return TextRefused(
                call.call, "timeout", f"The chat template took more than {self._render_s:g} s of processor time."
            )
        except MemoryError:
            return TextRefused(call.call, "too_large", "This text took more memory than allowed.")
        except UnicodeEncodeError:
            return TextRefused(call.call, "invalid", "The text holds half of a surrogate pair, which is no character.")
        except (ValueError, RecursionError) as e:
            return TextRefused(call.call, "invalid", f"The text cannot be counted: {e}")

    def _render(self, call: Render) -> Rendered:
        if self._template is None:
            raise RenderRefused("template", NO_TEMPLATE)
        messages = prepare_messages(call.messages, self._template.habits)
        with self._guard.limit(self._render_s, self._render_s + HARD_EXTRA_S):
            text = self._template.render(
                messages, tools=call.tools, variables=call.variables, now=datetime.now().astimezone()
            )
        return Rendered(call.call, self._count(text, add_bos=True, special=True), text)

    def _tokenize(self, call: Tokenize) -> Rendered:
        return Rendered(call.call, self._count(call.text, call.add_bos, call.special))

    def _count(self, text: str, add_bos: bool, special: bool) -> list[int]:
        """Tokens of a text, with the begin token where the model wants one and the text does not have it yet.

        An end token is never added: what follows is the model's answer.
        """
        size = len(text.encode())
        vocabulary = self._vocabulary
        limit = min(max(vocabulary.n_ctx_train * BYTES_PER_TOKEN, MIN_TEXT_BYTES), MAX_TEXT_BYTES)
        if size > limit:
            raise RenderRefused(
                "too_large",
                f"The prompt is {size} bytes long; this model, trained for {vocabulary.n_ctx_train} tokens, "
                f"takes at most {limit}.",
            )
        with self._guard.limit(TOKENIZE_S, TOKENIZE_S + HARD_EXTRA_S):
            tokens = vocabulary.tokenize(text, add_special=False, parse_special=special)
        begin = vocabulary.bos if add_bos and vocabulary.adds_bos else None
        if begin is not None and tokens[:1] != [begin]:
            tokens.insert(0, begin)
        return tokens

    # ----------------------------------------------------------------- heartbeat

    def _beat(self) -> None:
        while not self._done.wait(HEARTBEAT_S):
            started = self._call_started
            beat = Heartbeat(
                steps=self._calls,
                in_step_ms=0.0 if started is None else (time.monotonic() - started) * 1000,
                running=int(started is not None),
                rss_bytes=resident_bytes(),
            )
            try:
                self._frames.send(beat)
            except OSError:
                return  # the main thread sees the end of the stream itself


def _template_source(chosen: str) -> str:
    """The configured template: a path, or the Jinja text itself, which no path looks like."""
    if "{%" in chosen or "{{" in chosen or "\n" in chosen:
        return chosen
    path = Path(chosen).expanduser()
    try:
        with path.open("rb") as file:
            data: bytes = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(data) > MAX_TEMPLATE_BYTES:
            raise ModelFileError(f"The chat template {path} is larger than {MAX_TEMPLATE_BYTES} bytes.")
        return data.decode()
    except OSError as e:
        raise ModelFileError(f"The chat template {path} cannot be read: {e.strerror or e}.") from None
    except UnicodeDecodeError:
        raise ModelFileError(f"The chat template {path} is not UTF-8.") from None
