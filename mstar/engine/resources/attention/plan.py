"""What one label of a step needs in every layer: which tokens go through which kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mstar.engine.resources.attention.config import AttentionConfig
from mstar.engine.resources.kv.plan import KVPlan
from mstar.kernels.attention import Group, attend, gathered_elements, plan_groups, write_kv
from mstar.kernels.cpu.paged_decode import PagedDecode, first_seen

# Tokens of a row up to which the paged kernel, a query at a time, takes 0.3 to 0.75 of the groups' time; from twice as
# many it takes more, and four times as much at 4,096.
SHORT_ROW = 512


@dataclass(frozen=True)
class AttentionShape:
    """What is the same in every step."""

    page_size: int
    max_gather: int  # tokens whose pages one gather may copy
    device: torch.device
    dtype: torch.dtype  # of queries


class Scratch:
    """Memory for the pages of ``layer``'s kind that one group gathers, shared by all plans."""

    def __init__(self, layer: torch.Tensor) -> None:
        self.memory = layer.new_empty(0)
        self._layer = layer

    def reserve(self, groups: list[Group]) -> None:
        """Room for the largest gather among ``groups``; may move."""
        elements = gathered_elements(groups, self._layer)
        if elements > self.memory.numel():
            self.memory = self.memory.new_empty(elements)


class LabelPlan:
    """One label's planned attention (:class:`~.backends.LabelAttention`).  ``can_follow``: whether :meth:`follow` has
    any use.

    Leading rows of one new token go through the paged kernel, which stores their keys and values itself; the other
    rows through groups of equal shape, or through the kernel too while all are short.  Deterministic plans send every
    token through the kernel, or, where there is none, through a call of its own.

    Args:
        kv: the label's plan of the cache.
        spans: int64 [B], query tokens of each row of ``kv``.
        kernel: planned anew here, so in no other plan's use; None where the device or the dtypes have none.
    """

    repeats_in_graph = False  # page lists and masks are the host's

    def __init__(
        self,
        kv: KVPlan,
        spans: np.ndarray,
        causal: bool,
        config: AttentionConfig,
        shape: AttentionShape,
        kernel: PagedDecode | None,
        scratch: Scratch,
    ) -> None:
        self.kv, self.layer = kv, 0
        self._scratch = scratch
        own_keys = spans is kv.spans or np.array_equal(spans, kv.spans)
        self.is_decode = kv.is_decode if own_keys else bool((spans == 1).all())  # one query token in every row
        self.num_tokens = spans.size if self.is_decode else int(spans.sum())
        if causal and not own_keys and (spans > kv.kv_lens).any():
            raise ValueError(f"label {kv.label!r}: causal attention with more queries than its rows hold tokens")
        self.groups: list[Group] = []
        self._kernel: PagedDecode | None = None
        starts, pages, window = kv.indptrs.paged_kv_indptr, kv.indptrs.paged_kv_indices, config.sliding_window
        lead_rows = self._lead = stored_by_kernel = 0
        if kernel is not None:
            if own_keys:
                lead_rows = spans.size if self.is_decode else int(np.argmin(spans == 1))
            if lead_rows < spans.size and (config.deterministic or _are_short(kv.kv_lens, spans)):
                self._lead = self.num_tokens
                self._kernel = kernel.plan_rows(kv.kv_lens, spans, pages, starts[:-1], causal=causal, window=window)
            elif lead_rows:
                self._lead = stored_by_kernel = lead_rows
                ends = kv.kv_lens[:lead_rows]
                self._kernel = kernel.plan(ends, pages, starts, first_seen(ends, window))
        if self._lead < self.num_tokens:
            self.groups = plan_groups(
                kv.kv_lens[lead_rows:],
                spans[lead_rows:],
                pages,
                starts[lead_rows:],
                shape.page_size,
                causal=causal,
                window=window,
                max_gather=shape.max_gather,
                device=shape.device,
                dtype=shape.dtype,
                own_keys=own_keys,
                by_token=config.deterministic,
            )
            scratch.reserve(self.groups)
        # Rows of one token through the kernel alone: all else here hangs on the spans.
        self.can_follow = own_keys and self.is_decode and lead_rows == spans.size > 0
        self._spans, self._causal, self._window = spans, causal, window
        num_new = kv.spans.size if kv.is_decode else int(kv.spans.sum())
        self._stored = slice(stored_by_kernel, num_new) if stored_by_kernel < num_new else None
        if self._stored is not None:
            self._key_index, self._value_index = kv.key_index[self._stored], kv.value_index[self._stored]

    def follow(self, kv: KVPlan, spans: np.ndarray, causal: bool) -> bool:
        """Plans the same rows' next token in place, where that spares most of the work; whether it did.

        No step may still need what was planned before.
        """
        if not self.can_follow or spans is not self._spans or kv.spans is not spans or causal is not self._causal:
            return False
        assert self._kernel is not None
        self.kv, self.layer = kv, 0
        indptrs, ends = kv.indptrs, kv.kv_lens
        self._kernel.plan(ends, indptrs.paged_kv_indices, indptrs.paged_kv_indptr, first_seen(ends, self._window))
        return True

    def attend(self, layer: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores the new keys and values in ``layer`` and attends; arguments as :func:`attend` takes them.

        Tokens of q behind the planned ones are those of a padded bucket: they give zeros, and nothing of them is
        stored.
        """
        kernel, lead, count, scratch = self._kernel, self._lead, self.num_tokens, self._scratch.memory
        if self._stored is not None:
            write_kv(layer, self._key_index, self._value_index, k[self._stored], v[self._stored])
        if count == q.shape[0]:
            if kernel is None:
                return attend(self.groups, layer, q, k, v, scratch)
            if lead == count:
                return kernel.attend(layer, q, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out[count:] = 0
        if kernel is not None:
            kernel.attend(layer, q[:lead], k[:lead], v[:lead], out[:lead])
        if lead < count:
            rest = slice(lead, count)
            attend(self.groups, layer, q[rest], k[rest], v[rest], scratch, out[rest])
        return out

    def attend_stored(self, layer: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """:meth:`attend` over keys and values that are in ``layer``: reads the new ones back, and stores them again."""
        flat = layer.view(-1, *layer.shape[3:])
        k, v = (flat.index_select(0, index).to(q.dtype) for index in (self.kv.key_index, self.kv.value_index))
        return self.attend(layer, q, k, v)


def _are_short(kv_lens: np.ndarray, spans: np.ndarray) -> bool:
    """Whether no row of several query tokens is longer than :data:`SHORT_ROW`."""
    return int(kv_lens[spans > 1].max(initial=0)) <= SHORT_ROW
