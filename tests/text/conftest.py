"""Tokenizers for the text tests: the real one, and small ones that hold the same kinds of token."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from mstar.model.gguf_file import GGUFFile
from mstar.model.locate import locate
from mstar.text.gguf_tokenizer import TokenType, tokenizer_from_gguf
from mstar.text.tokenizer import Tokenizer
from mstar.utils.errors import LoadError

VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
ALPHABET = {byte: chr(byte) for byte in VISIBLE} | {byte: chr(0x100 + i) for i, byte in enumerate(HIDDEN)}


def spell(data: bytes) -> str:
    """``data`` in the letters of a byte-level vocabulary."""
    return "".join(ALPHABET[byte] for byte in data)


def byte_level_metadata(words: list[str] | None = None, pre: str = "smollm", **extra: Any) -> dict[str, Any]:
    """GGUF metadata: ids 0-255 are the bytes, then ``<|end|>`` (special) and ``<tool>`` (not), then merged words."""
    tokens = [spell(bytes([byte])) for byte in range(256)]
    types = [TokenType.NORMAL] * 256
    merges: list[str] = []
    tokens += ["<|end|>", "<tool>"]
    types += [TokenType.CONTROL, TokenType.USER_DEFINED]
    for word in words or []:
        letters = spell(word.encode())
        for cut in range(1, len(letters)):
            if letters[: cut + 1] not in tokens:
                tokens.append(letters[: cut + 1])
                types.append(TokenType.NORMAL)
                merges.append(f"{letters[:cut]} {letters[cut]}")
    named = {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 256,
        **named,
    }


SPM_PIECES = ["\u2581D", "\u2581is", "\u2581the", "\u2581Kha", "\u2581Daenerys", "lee", "si", "en", "ery", "\u2581a"]


def sentencepiece_metadata(**extra: Any) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece BPE: <unk> <s> </s>, 256 byte tokens, letters, then pieces by score."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    grown: list[str] = []
    for piece in SPM_PIECES:
        grown += [piece[: cut + 1] for cut in range(1, len(piece)) if piece[: cut + 1] not in grown]
    letters = sorted(set("".join(SPM_PIECES)))
    pieces = [*grown, *letters]
    tokens += pieces
    types += [TokenType.NORMAL] * len(pieces)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    named = {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **named,
    }


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata(["ABC ", "DEF", "HI", "Observ", "ation: x", " party", " ok"]))


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return tokenizer_from_gguf(sentencepiece_metadata())


WORDS = ["[UNK]", "he", "##llo", "##lo", ".", "!", "n't", "\u9f9c", "##\u9f9c", "\U0001fae0", "##a", "a", "b"]


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    """WORDS, then ``[CLS]`` (special) and ``<tool>`` (not)."""
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[CLS]", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(backend)


@pytest.fixture(scope="session")
def smollm2_metadata() -> dict[str, Any]:
    try:
        return dict(GGUFFile.open(locate("smollm2-135m")).metadata)
    except LoadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(smollm2_metadata)
