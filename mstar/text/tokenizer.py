"""Text to token ids and back, over the ``tokenizers`` library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from mstar.text.detokenizer import Detokenizer
from mstar.text.pieces import PieceDecoder, PieceTable
from mstar.utils.errors import InvalidArgument, LoadError


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        backend: the tokenizer; its truncation and padding are switched off.
        bos_id, eos_id: ids of the begin and end tokens, if the checkpoint names them.
        add_bos, add_eos: put them around an encoded text; None leaves that to the backend's own post-processor.
        vocab_size: number of ids, where the checkpoint has more than the backend knows (unused ones).

    Attributes:
        vocab_size: ids are in ``[0, vocab_size)``.
        bos_id, eos_id, add_bos: as given; ``add_bos`` is what ``encode`` does.
        strip_leading_space: decoding drops one space at the very start of a text (SentencePiece).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        vocab_size: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        vocab = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        decoder = _decoder_of(backend)
        self.strip_leading_space = decoder.strip_leading_space
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces = decoder.table(
            ((token_id, token) for token, token_id in vocab.items()),
            {token_id: token.content for token_id, token in added.items()},
        )
        self._plain_pieces = PieceTable(
            {token_id: piece for token_id, piece in self._pieces.items() if token_id not in self._special_ids}
        )
        self.vocab_size = max(vocab.values(), default=-1) + 1 if vocab_size is None else vocab_size
        self.bos_id = bos_id
        self.eos_id = eos_id
        self._uses_post_processor = add_bos is None and add_eos is None
        self._prefix = [bos_id] if add_bos and bos_id is not None else []
        self._suffix = [eos_id] if add_eos and eos_id is not None else []
        self.add_bos = bos_id is not None and self.encode("")[:1] == [bos_id]

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, beside it, ``tokenizer_config.json`` if there is one.

        Args:
            path: the file, or the folder that holds it.

        Raises:
            LoadError: a file is missing, malformed, or its decoder is of a kind not supported; the file is named.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise LoadError(f"{file}: no such file (a tokenizer.json is needed)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise LoadError(f"{file}: not a tokenizer: {error}") from error
        config = _read_config(file.with_name("tokenizer_config.json"))
        _add_configured_tokens(backend, config)
        try:
            return cls(
                backend,
                bos_id=_token_id(backend, config.get("bos_token")),
                eos_id=_token_id(backend, config.get("eos_token")),
                # A stored post-processor is the last word, as in transformers 5; without one only the flags can tell.
                add_bos=config.get("add_bos_token") if backend.post_processor is None else None,
                add_eos=config.get("add_eos_token") if backend.post_processor is None else None,
            )
        except LoadError as error:
            raise LoadError(f"{file}: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens spelt in it are recognised as such.

        ``add_special_tokens`` adds the begin and end tokens that the checkpoint asks for, also to a text that spells
        them itself, as the reference does.  A rendered chat is encoded without.  Safe to call from several threads.

        Raises:
            InvalidArgument: ``text`` holds lone surrogates.
        """
        try:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens and self._uses_post_processor)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidArgument("text", "must be valid Unicode (no lone surrogates)", text) from error
        ids: list[int] = encoding.ids
        if add_special_tokens and (self._prefix or self._suffix):
            return [*self._prefix, *ids, *self._suffix]
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Text of ``ids`` in one go, by the rules of ``Detokenizer``."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one sequence."""
        return Detokenizer(self._plain_pieces if skip_special_tokens else self._pieces, self.strip_leading_space)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that ``token_id`` adds to a text; empty for an id that stands for none."""
        return self._pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether ``token_id`` is a control token, which ``skip_special_tokens`` leaves out of a text."""
        return token_id in self._special_ids


def _decoder_of(backend: tokenizers.Tokenizer) -> PieceDecoder:
    decoder = backend.decoder
    return PieceDecoder(None if decoder is None else json.loads(decoder.__getstate__()))


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LoadError(f"{file}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise LoadError(f"{file}: must hold a JSON object")
    return config


def _token_text(token: Any) -> str | None:
    """Content of a token as tokenizer_config.json writes it: a string, or an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    text = _token_text(token)
    return None if text is None else backend.token_to_id(text)


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Make the added and named special tokens of tokenizer_config.json known to the backend, as transformers does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for token_id in sorted(listed, key=int):
        token = dict(listed[token_id])
        content = token.pop("content")
        if content in known:
            continue
        token.pop("__type", None)
        add = backend.add_special_tokens if token.get("special") else backend.add_tokens
        add([tokenizers.AddedToken(content, **token)])
        known.add(content)
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        text = _token_text(config.get(name))
        if text is not None and text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
            known.add(text)
