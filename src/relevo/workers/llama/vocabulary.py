"""The vocabulary of a model file, without its weights: text to tokens, tokens to bytes, metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relevo.core.errors import ModelFileError
from relevo.workers.llama.native import Native


class Vocabulary:
    """Tokenizer and metadata of a loaded model. Not for use by two threads at once."""

    def __init__(self, native: Native, model: Any, owns_model: bool = False) -> None:
        self._native = native
        self._ffi = native.ffi
        self._call = native.call
        self._model = model
        self._owns_model = owns_model
        self._vocab = native.call.llama_model_get_vocab(model)
        self.n_vocab: int = self._call.llama_vocab_n_tokens(self._vocab)
        # not llama_model_n_ctx_train: it says 0 when only the vocabulary was loaded
        length = self.meta(f"{self.meta('general.architecture')}.context_length") or ""
        self.n_ctx_train: int = int(length) if length.isdigit() else 0
        self._pieces: dict[int, bytes] = {}
        self._buffer = self._ffi.new("char[]", 256)

    @classmethod
    def load(cls, native: Native, path: Path) -> Vocabulary:
        """Read only the vocabulary of this GGUF file.

        Raises ModelFileError.
        """
        if not path.is_file():
            raise ModelFileError(f"There is no model file {path}.")
        parameters = native.call.llama_model_default_params()
        parameters.vocab_only = True
        native.log.errors.clear()
        model = native.call.llama_model_load_from_file(str(path).encode(), parameters)
        if model == native.ffi.NULL:
            reason = native.log.errors[0] if native.log.errors else "the library gave no reason"
            raise ModelFileError(f"The vocabulary of {path} cannot be read: {reason}.")
        return cls(native, model, owns_model=True)

    def close(self) -> None:
        """Free the model if this object loaded it. Harmless when called twice."""
        if self._owns_model and self._model is not None:
            self._call.llama_model_free(self._model)
        self._model = None
        self._vocab = None

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text. `add_special`: with BOS and EOS as the model wants them. `parse_special`: special
        tokens written out in the text become those tokens.

        Raises ValueError for text that is not valid Unicode or beyond 2**31 bytes or tokens.
        """
        data = text.encode("utf-8")
        if len(data) >= 2**31 - 16:
            raise ValueError("The text is too long to be tokenized.")
        room = len(data) + 16  # a token holds at least one byte; BOS, EOS and the added space need the rest
        out = self._ffi.new("llama_token[]", room)
        count = self._call.llama_tokenize(self._vocab, data, len(data), out, room, add_special, parse_special)
        if count < 0 and count != -(2**31):
            room = -count
            out = self._ffi.new("llama_token[]", room)
            count = self._call.llama_tokenize(self._vocab, data, len(data), out, room, add_special, parse_special)
        if count < 0:
            raise ValueError("The text has too many tokens.")
        return list(self._ffi.unpack(out, count)) if count else []

    def piece(self, token: int, special: bool = False) -> bytes:
        """Bytes of a token; control tokens are empty unless `special`. Raises ValueError when out of range."""
        if not special and (known := self._pieces.get(token)) is not None:
            return known
        self._check(token)
        count = self._call.llama_token_to_piece(self._vocab, token, self._buffer, len(self._buffer), 0, special)
        if count < 0:
            self._buffer = self._ffi.new("char[]", -count)
            count = self._call.llama_token_to_piece(self._vocab, token, self._buffer, -count, 0, special)
        data = bytes(self._ffi.buffer(self._buffer, max(count, 0)))
        if not special:
            self._pieces[token] = data
        return data

    def is_eog(self, token: int) -> bool:
        """Does this token end the generation? Raises ValueError when out of range."""
        self._check(token)
        return bool(self._call.llama_vocab_is_eog(self._vocab, token))

    def eog_tokens(self) -> frozenset[int]:
        """All tokens that end the generation."""
        is_eog, vocab = self._call.llama_vocab_is_eog, self._vocab
        return frozenset(token for token in range(self.n_vocab) if is_eog(vocab, token))

    @property
    def bos(self) -> int | None:
        """The token that begins a text, or None when the model has none."""
        token = int(self._call.llama_vocab_bos(self._vocab))
        return token if token >= 0 else None

    @property
    def eos(self) -> int | None:
        """The token that ends a text, or None when the model has none."""
        token = int(self._call.llama_vocab_eos(self._vocab))
        return token if token >= 0 else None

    @property
    def adds_bos(self) -> bool:
        """Does `tokenize(add_special=True)` put the begin token first?"""
        return bool(self._call.llama_vocab_get_add_bos(self._vocab))

    @property
    def chat_template(self) -> str | None:
        """The file's own chat template (Jinja), or None."""
        return self.meta("tokenizer.chat_template")

    def meta(self, key: str) -> str | None:
        """A scalar of the file's metadata as text, or None when there is none. Arrays are not readable here."""
        name = key.encode()
        count = self._call.llama_model_meta_val_str(self._model, name, self._ffi.NULL, 0)
        if count < 0:
            return None
        buffer = self._ffi.new("char[]", count + 1)
        self._call.llama_model_meta_val_str(self._model, name, buffer, count + 1)
        return bytes(self._ffi.buffer(buffer, count)).decode("utf-8", "replace")

    def _check(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"There is no token {token}; the vocabulary has {self.n_vocab}.")
