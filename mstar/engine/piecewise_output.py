"""What a captured region gives back: its static outputs, cut to the batch's own rows or tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from mstar.engine.accelerator_graph_config import PiecewiseCaptureShape


class PiecewiseOutput(Mapping[str, torch.Tensor]):
    """Named outputs of one replay.

    ``output[name]`` and ``get`` clone the real head, ``get_view`` is the static buffer itself, valid until the
    region's next ``run``.  The head is real rows of an output with one entry per row of the bucket, real tokens of
    one with an entry per token, and the whole of any other.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        shape: PiecewiseCaptureShape,
        real_rows: int,
        real_tokens: int,
        *,
        is_packed: bool,
    ) -> None:
        self._tensors = dict(tensors)
        heads = {shape.total_tokens: real_tokens, shape.bs: real_rows}
        if is_packed:
            heads[shape.total_tokens] = real_tokens  # a packed bucket of one token per row counts tokens
        self._heads = heads

    def get_view(self, name: str) -> torch.Tensor:
        """The real head without a copy; KeyError for an unknown name."""
        tensor = self._tensors[name]
        head = self._heads.get(tensor.shape[0]) if tensor.dim() else None
        return tensor if head is None else tensor[:head]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.get_view(name).clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
