"""A model's vocabulary in the form that grammars are matched against."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer

from mstar.engine.resources.grammar.config import Vocabulary

_SPECIAL_MARK = b"\xff"  # no byte of any UTF-8 text; llguidance takes a piece that begins with it for no text at all


class _Pieces:
    """What llguidance asks of a tokenizer (its ``TokenizerWrapper``)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], end_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = end_id

    def __call__(self, text: str) -> Sequence[int]:
        raise RuntimeError("grammars never encode text: their options rule out forced tokens")


def grammar_tokenizer(vocabulary: Vocabulary, vocab_size: int) -> LLTokenizer:
    """The vocabulary over logits of width ``vocab_size``, and behind it one id that stands for the end of a text.

    Special tokens, end-of-sequence tokens, tokens without text and ids beyond the vocabulary never are text of a
    grammar; several ids of one text are all allowed where that text is.

    Raises:
        ValueError: the vocabulary has more tokens than the logits are wide.
    """
    pieces = list(vocabulary.pieces)
    if len(pieces) > vocab_size:
        raise ValueError(f"the vocabulary has {len(pieces)} tokens, more than the {vocab_size} logits")
    pieces += [b""] * (vocab_size - len(pieces))
    barred = {i for i in (*vocabulary.special_ids, *vocabulary.eos_ids) if i < vocab_size}
    barred.update(i for i, piece in enumerate(pieces) if not piece)
    for i in barred:
        pieces[i] = _SPECIAL_MARK + b"[%d]" % i
    pieces.append(_SPECIAL_MARK + b"[end]")
    return LLTokenizer(_Pieces(pieces, sorted(barred), vocab_size), n_vocab=vocab_size + 1)  # type: ignore[arg-type]
