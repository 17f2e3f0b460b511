"""What ends a row whose step brought no token that can be used."""

from __future__ import annotations

import numpy as np

from mstar.utils.errors import EngineFault, ErrorCode, MstarError

NOT_FINITE, NOTHING_LEFT = 1, 2  # what a step's ``fault`` says of a row; 0 is fine
CONSTRAINTS = "allowed_token_ids, bad_words, stop_token_ids, guided_decoding_guide"  # what may bar every token


def codes_of(fault: np.ndarray, is_constrained: np.ndarray) -> np.ndarray:
    """What is wrong with each row [n], given what its step said, which knows of all its rows together only whether
    any of their tokens may have been barred."""
    return np.where((fault == NOTHING_LEFT) & ~is_constrained, NOT_FINITE, fault)


class ConstraintError(MstarError):
    """A request's own constraints cannot be met.  Its text begins with their fields."""

    code = ErrorCode.INVALID_ARG


def error_of(fault: int, position: int) -> MstarError:
    """The error that a row of this fault ends with, for want of its output token number ``position``, from 1."""
    if fault == NOTHING_LEFT:
        return ConstraintError(
            f"{CONSTRAINTS}: constraints that leave at least one token, got none at token {position}"
        )
    return EngineFault("the model's logits are not finite")


def broken_grammar(reason: str) -> MstarError:
    """The error of a row whose grammar gave up for a ``reason`` that lies in the request, as a resource words it; with
    none, the grammar did not take the token drawn for it."""
    if reason:
        return ConstraintError(reason)
    return EngineFault("guided_decoding_guide: the grammar could not follow the text any further")
