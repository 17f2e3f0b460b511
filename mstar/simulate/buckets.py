"""To which sizes an engine pads its steps: a captured step takes the time of its bucket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import msgspec
import numpy as np

from mstar.simulate.composition import Composition


class Buckets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Captured sizes, ascending: rows of ``decode``, rows and tokens of packed steps, which are those with prompts.

    What is larger than all of them is not padded, so with none nothing is.
    """

    decode_rows: tuple[int, ...] = ()
    packed_rows: tuple[int, ...] = ()
    packed_tokens: tuple[int, ...] = ()

    def pad(self, step: Composition) -> tuple[int, int]:
        """Rows and tokens of a step with its padding."""
        if not step.prompt_rows:
            rows = _up(self.decode_rows, step.decode_rows)
            return rows, rows
        rows, tokens = step.decode_rows + step.prompt_rows, step.decode_rows + step.prompt_tokens
        return _up(self.packed_rows, rows), _up(self.packed_tokens, tokens)

    def pad_all(self, steps: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`pad` of many, int64 [n] each; ``steps``: columns of the compositions."""
        decode_rows, prompt_rows = steps["decode_rows"], steps["prompt_rows"]
        has_prompt = prompt_rows > 0
        alone = _up_all(self.decode_rows, decode_rows)
        rows = np.where(has_prompt, _up_all(self.packed_rows, decode_rows + prompt_rows), alone)
        tokens = np.where(has_prompt, _up_all(self.packed_tokens, decode_rows + steps["prompt_tokens"]), alone)
        return rows, tokens


UNPADDED = Buckets()


def _up(sizes: tuple[int, ...], size: int) -> int:
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else size


def _up_all(sizes: tuple[int, ...], wanted: np.ndarray) -> np.ndarray:
    if not sizes:
        return wanted
    places = np.searchsorted(sizes, wanted)
    return np.where(places < len(sizes), np.array(sizes)[np.minimum(places, len(sizes) - 1)], wanted)
