"""Text to token ids and back, over the ``tokenizers`` library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from mstar.text.decoder_steps import clean_up_steps, piece_table, steps_of
from mstar.text.detokenizer import Detokenizer, PieceDetokenizer, StepDetokenizer
from mstar.text.pieces import PieceDecoder
from mstar.utils.errors import InvalidArgument, LoadError


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        backend: the tokenizer; its truncation and padding are switched off.
        bos_id, eos_id: ids of the begin and end tokens, if the checkpoint names them.
        add_bos, add_eos: put them around an encoded text; None leaves that to the backend's own post-processor.
        clean_up_spaces: decoding takes the space before punctuation away, as tokenizer_config.json can ask for.
        vocab_size: number of ids, where the checkpoint has more than the backend knows (unused ones).

    Attributes:
        vocab_size: ids are in ``[0, vocab_size)``.
        bos_id, eos_id, add_bos: as given; ``add_bos`` is what ``encode`` does.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        clean_up_spaces: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        tokens = _tokens_of(backend)
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        if not clean_up_spaces and (by_piece := PieceDecoder.of(decoder)) is not None:
            self._pieces, strip = by_piece.table(tokens, added), by_piece.strip_leading_space
            shown: Detokenizer = PieceDetokenizer(self._pieces, strip)
            plain: Detokenizer = PieceDetokenizer(self._pieces.without(self._special_ids), strip)
        else:
            steps = steps_of(decoder) + (clean_up_steps() if clean_up_spaces else [])
            self._pieces = piece_table(steps, tokens)
            shown = StepDetokenizer(tokens, steps)
            plain = StepDetokenizer({i: t for i, t in tokens.items() if i not in self._special_ids}, steps)
        self._fresh: dict[bool, Detokenizer] = {False: shown, True: plain}
        self.vocab_size = max(tokens, default=-1) + 1 if vocab_size is None else vocab_size
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
            LoadError: a file is missing or malformed, or its decoder cannot be followed as tokens come; the file is
                named.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise LoadError(f"{file}: no such file (a tokenizer.json is needed)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise LoadError(f"{file}: not a tokenizer: {error}") from error
        config_file = file.with_name("tokenizer_config.json")
        config = _read_config(config_file)
        try:
            _add_configured_tokens(backend, config)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise LoadError(f"{config_file}: added_tokens_decoder: must hold tokens by id ({error!r})") from error
        try:
            return cls(
                backend,
                bos_id=_token_id(backend, config.get("bos_token")),
                eos_id=_token_id(backend, config.get("eos_token")),
                # A stored post-processor is the last word, as in transformers 5; without one only the flags can tell.
                add_bos=config.get("add_bos_token") if backend.post_processor is None else None,
                add_eos=config.get("add_eos_token") if backend.post_processor is None else None,
                # transformers does not do it to a BPE's text, whatever the file says: it would spoil it.
                clean_up_spaces=config.get("clean_up_tokenization_spaces") is True
                and not isinstance(backend.model, tokenizers.models.BPE),
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
        with_special = add_special_tokens and self._uses_post_processor
        try:  # as a batch: the library's plain encode holds the interpreter lock, for a long text most of a second
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=with_special)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidArgument("text", "must be valid Unicode (no lone surrogates)", text) from error
        ids: list[int] = encoding.ids
        if add_special_tokens and (self._prefix or self._suffix):
            return [*self._prefix, *ids, *self._suffix]
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Text of ``ids`` in one go, by the rules of ``Detokenizer``.

        That is the text of the tokenizers library, but for bytes that are no character: one U+FFFD per maximal
        ill-formed part (the library's byte fallback gives one per byte of the whole run), none for continuation bytes
        at the very start.
        """
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one sequence."""
        return self._fresh[skip_special_tokens].fork()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that ``token_id`` adds inside a text; empty for an id that stands for none.

        Where position matters, a token at the very start may add less (the space of a word goes), and so may one at the
        very end (BPEDecoder) or after itself (CTC).
        """
        return self._pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """Text of ``token_id`` alone, also of a control token; U+FFFD for bytes that are no character."""
        return self._pieces[token_id].decode(errors="replace")

    def all_pieces(self) -> list[bytes]:
        """``token_bytes`` of every id below ``vocab_size``."""
        return [self._pieces[token_id] for token_id in range(self.vocab_size)]

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        return self._special_ids

    def is_special(self, token_id: int) -> bool:
        """Whether ``token_id`` is a control token, which ``skip_special_tokens`` leaves out of a text."""
        return token_id in self._special_ids


def _tokens_of(backend: tokenizers.Tokenizer) -> dict[int, str]:
    """Token by id, as the vocabulary spells it; also the second and further ids of a token that has several."""
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = {token_id: token for token, token_id in vocab.items()}
    end = max(max(tokens, default=-1) + 1, backend.get_vocab_size(with_added_tokens=True))
    for token_id in range(end):
        if token_id not in tokens and (token := backend.id_to_token(token_id)) is not None:
            tokens[token_id] = token
    return tokens


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
