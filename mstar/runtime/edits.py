"""Parameters that change a request's logits, in token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mstar.conductor.request import LogitEdits
from mstar.runtime.params import SamplingParams
from mstar.runtime.prompts import refuse_surrogates
from mstar.utils.errors import InvalidArgument

if TYPE_CHECKING:
    from mstar.model.front import ModelFront
    from mstar.text.tokenizer import Tokenizer


def logit_edits_of(front: ModelFront, params: SamplingParams) -> LogitEdits | None:
    """What a request changes; None where it changes nothing.

    Raises:
        InvalidArgument: an id outside the vocabulary, or a bad word without tokens.
    """
    bias = params.logit_bias or {}
    check_in_vocabulary("logit_bias", bias, front.vocab_size)
    check_in_vocabulary("allowed_token_ids", params.allowed_token_ids, front.vocab_size)
    edits = LogitEdits(
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias=tuple((token_id, value) for token_id, value in bias.items() if value),
        bad_words=bad_word_ids(front.tokenizer, params.bad_words, front.vocab_size) if params.bad_words else (),
        allowed_ids=np.unique(np.array(params.allowed_token_ids, "<i4")).tobytes(),
    )
    return None if edits == LogitEdits() else edits


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell a word at the start of a text, and after a space.

    Each word without its leading spaces (one of nothing but spaces stays as it is), and the same behind one space, as
    the tokenizer alone splits them, as in vLLM; there the second form counts only where it has as many tokens.

    Raises:
        InvalidArgument: a word that has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        refuse_surrogates("bad_words", word)
        bare = word.lstrip(" ") or word
        forms = [tuple(tokenizer.encode(form, add_special_tokens=False)) for form in (bare, " " + bare)]
        if not all(forms):
            raise InvalidArgument("bad_words", "words of at least one token", word)
        sequences |= dict.fromkeys(form for form in forms if max(form) < vocab_size)
    return tuple(sequences)


def check_in_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidArgument, naming the parameter, for an id that the model has no logit for."""
    outside = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if outside:
        raise InvalidArgument(name, f"token ids in [0, {vocab_size})", outside[0])
