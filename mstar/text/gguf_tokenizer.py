"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from mstar.text.pretokenizers import find_pre_tokenizer
from mstar.text.tokenizer import Tokenizer
from mstar.utils.errors import LoadError

_SPACE = "\u2581"  # how SentencePiece writes a space


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that ``tokenizer.ggml.*`` describes.

    ``model`` "gpt2" is a byte-level BPE cut by the pre-tokenizer that ``pre`` names; "llama" is a SentencePiece BPE
    with byte fallback, whose merges follow from the scores where the file does not list them.

    Args:
        metadata: key/value part of the file; arrays as lists.

    Raises:
        LoadError: a key is missing or inconsistent, or names a kind of tokenizer or pre-tokenizer not known here.
    """
    tokens: Sequence[str] = _required(metadata, "tokens")
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise LoadError(f"tokenizer.ggml.token_type: {len(tokens)} values are needed, got {len(types)}")
    model = _required(metadata, "model")
    match model:
        case "gpt2":
            backend, add_bos = _byte_level_bpe(metadata, tokens, types)
        case "llama":
            backend, add_bos = _sentencepiece_bpe(metadata, tokens, types)
        case _:
            raise LoadError(f"tokenizer.ggml.model: gpt2 or llama is supported, got {model!r}")
    _add_tokens(backend, tokens, types)
    return Tokenizer(
        backend,
        bos_id=_token_id(metadata, "bos_token_id", len(tokens)),
        eos_id=_token_id(metadata, "eos_token_id", len(tokens)),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        vocab_size=len(tokens),
    )


def _byte_level_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    rule = find_pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    merges = _split_merges(_required(metadata, "merges"))
    backend = _bpe_backend(_vocabulary(tokens, types), merges, ignore_merges=rule.ignore_merges)
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer()
    backend.pre_tokenizer = rule.build()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    vocab = _vocabulary(tokens, types)
    if "tokenizer.ggml.merges" in metadata:
        merges = _split_merges(metadata["tokenizer.ggml.merges"])
    else:
        merges = _merges_from_scores(tokens, types, _required(metadata, "scores"))
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None)
    backend = _bpe_backend(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    add_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend(_SPACE)] if add_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


def _bpe_backend(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise LoadError(f"tokenizer.ggml.merges: do not fit tokenizer.ggml.tokens: {error}") from error


def _vocabulary(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Id per token, the first one where a text occurs twice; unused ids stand for no text."""
    vocab: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != TokenType.UNUSED:
            vocab.setdefault(token, token_id)
    return vocab


def _split_merges(merges: Iterable[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, separator, right = merge.partition(" ")
        if not separator:
            raise LoadError(f"tokenizer.ggml.merges: two pieces parted by a space are needed, got {merge!r}")
        pairs.append((left, right))
    return pairs


def _merges_from_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best score first (as transformers derives them)."""
    if len(scores) != len(tokens):
        raise LoadError(f"tokenizer.ggml.scores: {len(tokens)} values are needed, got {len(scores)}")
    normal = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] == TokenType.NORMAL}
    long = [(token, token_id) for token, token_id in normal.items() if len(token) > 1]
    if len({scores[token_id] for _, token_id in long}) < len(long):
        raise LoadError("tokenizer.ggml.scores: the score of each piece must differ for an order of merges to follow")
    merges = []
    for token, _ in sorted(long, key=lambda item: -scores[item[1]]):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in normal and pair[1] in normal]
        merges += sorted(pairs, key=lambda pair: (normal[pair[0]], normal[pair[1]]))
    return merges


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Make control and user-defined tokens known as wholes; control tokens and the unknown token are special."""
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _required(metadata: Mapping[str, Any], name: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise LoadError(f"tokenizer.ggml.{name}: is needed, the file has none")
    return value


def _token_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    if not 0 <= value < vocab_size:
        raise LoadError(f"tokenizer.ggml.{name}: an id in [0, {vocab_size}) is needed, got {value}")
    return int(value)
