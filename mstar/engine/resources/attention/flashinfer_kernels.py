"""FlashInfer's compiled kernels, called below its wrappers.

The wrappers wait for the device when they copy page lists for a captured step, and take 20 us of Python a layer; what
they add to the calls made here is buffers, which the planner has, and checks.  This is the one place that knows the
arguments of FlashInfer's modules, which hold for one version.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch

from mstar.engine.resources.attention.flashinfer_rows import DeviceRows
from mstar.engine.resources.attention.flashinfer_workspace import HeadShape

DECODE_GROUPS = (1, 2, 3, 4, 8)  # query heads per kv head that the CUDA-core decode kernel is built for

_NHD = 0
_NO_MASK, _CAUSAL = 0, 1
_NO_SOFT_CAP, _ROPE_SCALE, _ROPE_THETA = 0.0, 1.0, 1e4


class Workspace(NamedTuple):
    """uint8 memory of one kernel on one slot.  A plan writes ``pinned``, on the host, and copies it to ``ints``."""

    floats: torch.Tensor
    ints: torch.Tensor
    pinned: torch.Tensor


class HostRows(NamedTuple):
    """int32 on the host: [B + 1], [B + 1], [B]."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_lens: torch.Tensor


@dataclass(frozen=True)
class PlanOptions:
    """``is_captured``: the launch is the same for all rows of one number, of at most ``max_tokens`` query tokens."""

    max_tokens: int
    is_captured: bool
    causal: bool
    splits: bool  # keys of one row over several thread blocks, where that helps


class PagedKernel(Protocol):
    """Plans on the host, once for all layers, in order with the current stream; runs on the device."""

    def plan(self, workspace: Workspace, rows: HostRows, options: PlanOptions) -> Any:
        """What :meth:`run` needs to know; all that changes between steps of a captured kernel is in the workspace."""
        ...

    def chunk_pages(self, workspace: Workspace, plan: Any) -> int:
        """Pages of a row that one thread block takes, by the workspace's last plan; 0 when rows are not split."""
        ...

    def run(
        self,
        workspace: Workspace,
        plan: Any,
        q: torch.Tensor,
        layer: torch.Tensor,
        rows: DeviceRows,
        out: torch.Tensor,
        causal: bool,
    ) -> None:
        """q and out [n, query heads, head_dim]; layer [pages, 2, page_size, kv heads, head_dim]."""
        ...


@dataclass(frozen=True)
class Geometry:
    """What a kernel is built for, and what it is told of the model.  ``window_left``: tokens before its own that a
    query sees, -1 for all."""

    heads: HeadShape
    page_size: int
    window_left: int
    dtype: torch.dtype


class DecodeKernel:
    """One query token a row, on CUDA cores."""

    def __init__(self, module: SimpleNamespace, geometry: Geometry, use_pdl: bool) -> None:
        self._module = module
        self._geometry = geometry
        self._use_pdl = use_pdl
        self._dtype = torch.empty(0, dtype=geometry.dtype)

    def plan(self, workspace: Workspace, rows: HostRows, options: PlanOptions) -> Any:
        heads = self._geometry.heads
        return self._module.plan(
            workspace.floats,
            workspace.ints,
            workspace.pinned,
            rows.kv_indptr,
            rows.kv_lens.numel(),
            heads.num_qo_heads,
            heads.num_kv_heads,
            self._geometry.page_size,
            options.is_captured,
            self._geometry.window_left,
            _NO_SOFT_CAP,
            heads.head_dim,
            heads.head_dim,
            self._dtype,
            self._dtype,
        )

    def chunk_pages(self, workspace: Workspace, plan: Any) -> int:
        return _int_at(workspace, plan[7]) // self._geometry.page_size if plan[9] else 0

    def run(
        self,
        workspace: Workspace,
        plan: Any,
        q: torch.Tensor,
        layer: torch.Tensor,
        rows: DeviceRows,
        out: torch.Tensor,
        causal: bool,
    ) -> None:
        self._module.run(
            workspace.floats,
            workspace.ints,
            plan,
            q,
            layer[:, 0],
            layer[:, 1],
            rows.kv_indptr,
            rows.pages,
            rows.last_page_len,
            out,
            None,  # no log-sum-exp wanted
            _NHD,
            self._geometry.window_left,
            self._use_pdl,
            None,  # no slopes of ALiBi
            _NO_SOFT_CAP,
            self._geometry.heads.head_dim**-0.5,
            _ROPE_SCALE,
            _ROPE_THETA,
        )


class PrefillKernel:
    """Any number of query tokens a row, on tensor cores: FlashInfer's "fa2" or "fa3", which never splits rows."""

    def __init__(self, module: SimpleNamespace, backend: str, geometry: Geometry, use_pdl: bool) -> None:
        self._module = module
        self._is_fa2 = backend == "fa2"
        self._geometry = geometry
        self._use_pdl = use_pdl

    def plan(self, workspace: Workspace, rows: HostRows, options: PlanOptions) -> Any:
        heads = self._geometry.heads
        arguments = [
            workspace.floats,
            workspace.ints,
            workspace.pinned,
            rows.qo_indptr,
            rows.kv_indptr,
            rows.kv_lens,
            options.max_tokens,
            rows.kv_lens.numel(),
            heads.num_qo_heads,
            heads.num_kv_heads,
            self._geometry.page_size,
            options.is_captured,
            heads.head_dim,
            heads.head_dim,
            options.causal,
            self._geometry.window_left,
        ]
        if self._is_fa2:
            arguments += [-1, not options.splits, 0]  # no split size of ours, no thread blocks kept free
        return self._module.plan(*arguments)

    def chunk_pages(self, workspace: Workspace, plan: Any) -> int:
        return _int_at(workspace, plan[9]) // self._geometry.page_size if self._is_fa2 and plan[14] else 0

    def run(
        self,
        workspace: Workspace,
        plan: Any,
        q: torch.Tensor,
        layer: torch.Tensor,
        rows: DeviceRows,
        out: torch.Tensor,
        causal: bool,
    ) -> None:
        self._module.paged_run(
            workspace.floats,
            workspace.ints,
            plan,
            q,
            layer[:, 0],
            layer[:, 1],
            rows.qo_indptr,
            rows.kv_indptr,
            rows.pages,
            rows.last_page_len,
            out,
            None,  # no log-sum-exp wanted
            _CAUSAL if causal else _NO_MASK,
            _NHD,
            self._geometry.window_left,
            self._use_pdl,
            *(None,) * 6,  # masks, slopes and item positions of other uses
            _NO_SOFT_CAP,
            self._geometry.heads.head_dim**-0.5,
            *(None,) * 3,  # scales of quantised tensors
            _ROPE_SCALE,
            _ROPE_THETA,
            0,
            workspace.floats.numel(),
        )


def _int_at(workspace: Workspace, offset: int) -> int:
    """The int32 that the last plan wrote ``offset`` bytes into its workspace."""
    return int(workspace.pinned[offset : offset + 4].view(torch.int32).item())
