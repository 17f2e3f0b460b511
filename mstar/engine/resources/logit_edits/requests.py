"""Whose logits are edited, and how many tokens each has: alike wherever the edits are made."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch

from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.logit_edits.config import LogitEditsReqConfig, LogitEditsSpec
from mstar.engine.resources.logit_edits.row_edits import RowEdits
from mstar.engine.resources.spec import ResourceReqConfig


class EditsOfRequests(Resource):
    """Edits each request's logits as it asked, in this order: allowed ids, bad words, bias, presence and frequency
    penalty; and, once nobody else bars tokens any more, stop ids before ``min_tokens``.

    What was generated lies on the device and moves with its step, so that a step may be launched before the host saw
    the tokens of the one before; how many tokens were kept is known on the host.
    """

    def __init__(self, spec: LogitEditsSpec, info: EngineResourceInfo) -> None:
        self._vocab, self._capacity, self._device = spec.vocab_size, info.capacity, info.device
        self._edits: dict[int, RowEdits] = {}  # by master row, those that have any
        self._is_live = np.zeros(info.total_rows, bool)
        self._kept = np.zeros(info.total_rows, np.int64)  # tokens, of live rows, those of launched steps included
        self._row_of: dict[int, int] = {}
        self._version = 0  # moves whenever a row's edits do

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        """Takes a :class:`LogitEditsReqConfig` (None edits nothing) for master row ``row``.

        A request that is already there takes new edits and keeps what it has generated.  Padding rows hold nothing.

        Raises:
            ValueError: an id outside the vocabulary, or another value that cannot be honoured; names the field.
        """
        if row >= self._capacity:
            return
        edits = None
        if config is not None:
            assert isinstance(config, LogitEditsReqConfig)
            edits = RowEdits.of(config, self._vocab)
        if self._row_of.get(request_id) != row:
            self._row_of[request_id] = row
            self._forget(row)
        self._set(row, edits)

    def remove_request(self, request_id: int, row: int) -> None:
        if self._row_of.pop(request_id, None) is not None:
            self._forget(row)

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` [rows, vocab] of the planned step, edited, contiguous float32: on the CPU in place where they
        allow it, on a device in memory of their own, so that ``logits`` stay as they are."""

    @abstractmethod
    def hold_back(self, logits: torch.Tensor) -> torch.Tensor:
        """Bars the stop ids of rows with fewer than ``min_tokens`` tokens in ``logits`` float32 [rows, vocab],
        contiguous, in place; a row that has nothing else left is spared.  Returns them."""

    @abstractmethod
    def record(self, tokens: torch.Tensor) -> None:
        """``tokens`` int64 [rows] were drawn; once per step.  The kept ones count as generated from its commit on."""

    @abstractmethod
    def _take(self, row: int, edits: RowEdits) -> None:
        """The row has these edits from now on, and keeps what it has generated."""

    @abstractmethod
    def _drop(self, row: int) -> None:
        """The row needs no memory any more."""

    def _set(self, row: int, edits: RowEdits | None) -> None:
        if edits is None or edits.is_empty:
            self._clear(row)
            return
        self._edits[row] = edits
        self._is_live[row] = True
        self._version += 1
        self._take(row, edits)

    def _clear(self, row: int) -> None:
        """The row edits nothing any more."""
        if self._edits.pop(row, None) is not None:
            self._is_live[row] = False
            self._version += 1
            self._drop(row)

    def _forget(self, row: int) -> None:
        self._clear(row)
        self._kept[row] = 0
