"""What ends a row whose step brought no token that can be used."""

from __future__ import annotations

import numpy as np

from mstar.utils.errors import EngineFault, ErrorCode, MstarError

NOT_FINITE, NOTHING_LEFT = 1, 2  # what a step's ``fault`` says of a row; 0 is fine


def codes_of(fault: np.ndarray, is_constrained: np.ndarray) -> np.ndarray:
    """What is wrong with each row [n], given what its step said, which knows of all its rows together only whether
    any of their tokens may have been barred."""
    return np.where((fault == NOTHING_LEFT) & ~is_constrained, NOT_FINITE, fault)


class ConstraintError(MstarError):
    """A request's own constraints contradict each other, or what its text came to."""

    code = ErrorCode.INVALID_ARG


def error_of(fault: int) -> MstarError:
    """The error that a row of this fault ends with."""
    if fault == NOTHING_LEFT:
        return ConstraintError("no token is left that the request's constraints allow")
    return EngineFault("the model's logits are not finite")


def broken_grammar() -> MstarError:
    """The error of a row whose grammar did not take the token drawn for it, or gave up."""
    return EngineFault("guided_decoding_guide: the grammar could not follow the text any further")
