"""Log-probabilities as people read them: by token id, with rank and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mstar.text.tokenizer import Tokenizer


class Logprob(NamedTuple):
    """Of one token at one position.  ``rank`` 1 is the most likely; ``decoded_token`` is the token's own text."""

    logprob: float
    rank: int
    decoded_token: str


def positions(
    records: np.ndarray, ids: Sequence[int] | np.ndarray, num_top: int, tokenizer: Tokenizer
) -> list[dict[int, Logprob]]:
    """What is told of each position: its own token first, then the most likely ones in their order.

    Args:
        records: :data:`~mstar.conductor.request.LOGPROB` [n].
        ids: the tokens at these positions, [n].
        num_top: how many of the most likely tokens to tell of; the own token is in the dict once.
    """
    told = []
    columns = (
        np.asarray(ids).tolist(),
        records["logprob"].tolist(),
        records["rank"].tolist(),
        records["top_ids"][:, :num_top].tolist(),
        records["top_logprobs"][:, :num_top].tolist(),
    )
    for token_id, logprob, rank, top_ids, top_logprobs in zip(*columns, strict=True):
        position = {token_id: Logprob(logprob, rank, tokenizer.token_text(token_id))}
        for top_rank, (top_id, top_logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
            if top_id >= 0 and top_id not in position:
                position[top_id] = Logprob(top_logprob, top_rank, tokenizer.token_text(top_id))
        told.append(position)
    return told
