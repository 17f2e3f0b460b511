"""From a step's positions to the rotary tables its forward turns heads by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.positions.config import PositionConfig
from mstar.engine.resources.ragged import indptr
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import SlotLease
from mstar.kernels import rope, rope_frequencies

if TYPE_CHECKING:
    from mstar.engine.resources.positions.graph_positions import GraphPositions

Tables = tuple[torch.Tensor, torch.Tensor]
_FEWEST_KNOWN, _MOST_KNOWN = 512, 32768  # positions


@dataclass
class Positions:
    """What is planned of one label, on the device.

    ``ids`` int64 [n], or [n, 3] where positions are three-fold.  ``bases`` fp32 [n], each token's theta, under dynamic
    scaling only.  ``tables`` are cosine and sine, [n, 1, rotary_dim] each; None until the forward builds them.
    ``end``: the positions of the first ``num_known`` tokens (None: of all) lie below it; None where the host does not
    know.  With ``head`` the forward computes ids and tables, in place.
    """

    ids: torch.Tensor
    bases: torch.Tensor | None
    tables: Tables | None = None
    end: int | None = None
    num_known: int | None = None
    head: GraphPositions | None = None


class Rotary:
    """The rotary embedding of one configuration: a function of positions, without state of requests.

    ``axes`` is 3 where positions are three-fold, else 1.  Where positions alone give the angles, pair i turns by
    ``position * frequencies[i]``, fp32 [dim / 2]; tables are multiplied with ``factor``.
    """

    def __init__(self, config: PositionConfig, head_dim: int, info: EngineResourceInfo) -> None:
        """Raises ValueError for a rotary width, sections or scaling that do not fit; names what is wrong."""
        dim = config.rotary_dim or head_dim
        if dim % 2 or not 0 < dim <= head_dim:
            raise ValueError(f"rotary_dim must be even and in 2..{head_dim}, got {dim}")
        section = config.mrope_section
        if section is not None and sum(section) != dim // 2:
            raise ValueError(f"mrope_section must sum to {dim // 2}, half of rotary_dim, got {section}")
        self.dim = dim
        self.dtype = config.rope_dtype or info.dtype
        self.axes = 1 if section is None else 3
        self.is_dynamic = rope_frequencies.scaling_type(config.rope_scaling) == rope_frequencies.DYNAMIC
        self.interleave = config.interleave
        self._config = config
        self._known: Tables | None = None
        frequencies = rope_frequencies.inverse_frequencies(dim, config.rope_theta, config.rope_scaling)
        self.frequencies = self._scaled(frequencies).to(info.device)
        self.factor = rope_frequencies.attention_factor(config.rope_scaling)
        self._axes = None
        if section is not None:
            self._axes = torch.tensor(rope.axes_of(section, config.mrope_interleaved), device=info.device)

    def bases(self, ids: np.ndarray, spans: np.ndarray) -> np.ndarray | None:
        """Each token's theta fp32 [n] under dynamic scaling, which follows the last position of the token's row.

        ``ids`` int64 [n * axes] in token order, rows of ``spans`` [B] tokens end to end.
        """
        if not self.is_dynamic:
            return None
        assert self._config.rope_scaling is not None
        spans = spans[spans > 0]
        lengths = np.maximum.reduceat(ids, indptr(spans * self.axes)[:-1]) + 1 if spans.size else ids
        scaling = self._config.rope_scaling
        rows = rope_frequencies.dynamic_bases(lengths, self.dim, self._config.rope_theta, scaling)
        return np.repeat(rows, spans)

    def tables(self, positions: Positions, out: Tables | None = None) -> Tables:
        """Cosine and sine in ``dtype``; into ``out`` where given, whose tail behind the known positions keeps its old
        contents.  The same bits either way."""
        ids, count = positions.ids, positions.num_known
        known = None if positions.end is None else self._known_up_to(positions.end)
        if known is not None and count in (None, ids.shape[0]):
            cos_out, sin_out = out or (None, None)
            cos = torch.index_select(known[0], 0, ids, out=cos_out)
            return cos, torch.index_select(known[1], 0, ids, out=sin_out)
        if known is not None and out is not None:
            for table, kept in zip(known, out, strict=True):
                torch.index_select(table, 0, ids[:count], out=kept[:count])
            return out
        frequencies = self.frequencies
        if positions.bases is not None:
            frequencies = self._scaled(rope_frequencies.frequencies_of(positions.bases, self.dim))
        return self._computed(positions.ids if self.axes == 1 else positions.ids.t(), frequencies, out)

    def _computed(self, ids: torch.Tensor, frequencies: torch.Tensor, out: Tables | None = None) -> Tables:
        cos, sin = rope.cos_sin(ids, frequencies, self.interleave, factor=self.factor, axes=self._axes, out=out)
        return cos.to(self.dtype), sin.to(self.dtype)

    def _known_up_to(self, end: int) -> Tables | None:
        """Tables of all positions below ``end``, and of more: a prompt's are looked up in a fifth to a third of the
        time that they take to compute.  None where positions alone don't give them, or there would be too many."""
        if self.axes != 1 or self.is_dynamic or end > _MOST_KNOWN:
            return None
        if self._known is None or self._known[0].shape[0] < end:
            count = min(2 * -(-end // _FEWEST_KNOWN) * _FEWEST_KNOWN, _MOST_KNOWN)
            self._known = self._computed(torch.arange(count, device=self.frequencies.device), self.frequencies)
            if self.frequencies.is_cuda and not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()  # plans made ahead read it on another stream
        return self._known

    def _scaled(self, frequencies: torch.Tensor) -> torch.Tensor:
        scale = self._config.rope_scale
        return frequencies if scale == 1 else frequencies / scale


class LabelBuffers:
    """The static buffers of one label: a leased step's ids, thetas and tables lie at addresses of its slot.

    Their tails keep old contents, which are positions of some earlier step.
    """

    def __init__(self, rotary: Rotary, theta: float, info: EngineResourceInfo) -> None:
        self._rotary = rotary
        self._ids = StepBuffer(torch.int64, info.device, info.num_slots)
        self._bases = StepBuffer(torch.float32, info.device, info.num_slots, fill=theta)
        self._tables = [StepBuffer(rotary.dtype, info.device, info.num_slots) for _ in range(2)]

    def reserve(self, tokens: int) -> None:
        """Room for steps of ``tokens``; moves the buffers when it grows them."""
        self._ids.reserve(tokens * self._rotary.axes)
        if self._rotary.is_dynamic:
            self._bases.reserve(tokens)
        for buffer in self._tables:
            buffer.reserve(tokens * self._rotary.dim)

    def put(
        self, ids: np.ndarray | torch.Tensor, bases: np.ndarray | None, tokens: int, lease: SlotLease | None
    ) -> Positions:
        """``ids`` flat in token order, ``bases`` by token; both as the first of ``tokens`` tokens."""
        axes = self._rotary.axes
        device_ids = self._ids.put_head(ids, tokens * axes, lease)
        device_bases = None if bases is None else self._bases.put_head(bases, tokens, lease)
        device_ids = device_ids if axes == 1 else device_ids.view(tokens, axes)
        if isinstance(ids, torch.Tensor) or not ids.size:
            return Positions(device_ids, device_bases)
        return Positions(device_ids, device_bases, end=int(ids.max()) + 1, num_known=ids.size // axes)

    def put_counters(self, counters: np.ndarray, streams: np.ndarray, lease: SlotLease | None) -> Positions:
        """``counters[streams]``, one position for each token and row; ``counters`` int64, ``streams`` int64 [n]."""
        if lease is None:
            return Positions(self._ids.put(counters[streams], None), None)
        ids = self._ids.static(streams.size, lease)
        counters.take(streams, out=ids.host, mode="clip")  # no stream is out of range; the other modes buffer
        return Positions(ids.sent(), None)

    def build_tables(self, positions: Positions, lease: SlotLease | None) -> None:
        """Stages the tables: in the slot's buffers under a lease."""
        out = None if lease is None else self._static_tables(positions.ids.shape[0], lease)
        positions.tables = self._rotary.tables(positions, out)

    def unfilled(self, tokens: int, lease: SlotLease) -> Positions:
        """Ids and tables of the slot for the forward to fill, one position for each token."""
        return Positions(self._ids.view(tokens, lease), None, self._static_tables(tokens, lease))

    def _static_tables(self, tokens: int, lease: SlotLease) -> Tables:
        dim = self._rotary.dim
        cos, sin = (buffer.view(tokens * dim, lease).view(tokens, 1, dim) for buffer in self._tables)
        return cos, sin
