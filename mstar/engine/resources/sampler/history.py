"""What requests' own tokens do to their next one: the presence penalty, the windowed penalty, the least length."""

from __future__ import annotations

import numpy as np
import torch

from mstar.engine.resources.columns import StepColumns
from mstar.engine.resources.row_memory import RowMemory
from mstar.engine.resources.sampler.config import SamplerSpec, SamplingReqConfig
from mstar.engine.resources.sampler.history_rows import HistoryRows, HostRows
from mstar.engine.resources.sampler.pool import RowPool
from mstar.engine.resources.step import SlotLease
from mstar.kernels.penalties import LEAST_FACTOR, MOST_FACTOR

_MOST_COUNT = 2**62


class History:
    """By master row: what a request looks back at, and the memory for it, for those that do.

    ``seen`` bool [V]: the ids that a presence penalty has met.  ``ring`` [longest window]: a request with window ``w``
    keeps draw ``n`` in column ``n mod w``, the others stay -1.  A request of penalty 1 holds neither.  How many tokens
    there are is the count of kept draws, which others keep.
    """

    def __init__(
        self,
        spec: SamplerSpec,
        num_rows: int,
        device: torch.device,
        num_slots: int,
        on_host: bool | None = None,
    ) -> None:
        """``num_rows`` master rows and the trash row behind them.  ``on_host``: steps touch just the rows that look
        back, in NumPy; None does so on the CPU."""
        self.on_host = device.type == "cpu" if on_host is None else on_host
        self.has_seen, self.has_ring = spec.enable_repetion_penalty, spec.max_repetition_window > 0
        self._has_width = spec.vocab_size is not None
        self.seen: RowPool | RowMemory
        self.ring: RowPool | RowMemory
        self.stop_ids = np.unique(np.array(spec.min_tokens_stop_ids, np.int64))
        if self.on_host:
            self.seen = RowPool(num_rows, spec.vocab_size, torch.bool, 0)
            self.ring = RowPool(num_rows, spec.max_repetition_window, torch.int64, -1)
        else:
            from mstar.engine.resources.sampler.device_history_rows import COLUMNS

            self.seen = RowMemory(num_rows, spec.vocab_size, torch.bool, 0, device)
            self.ring = RowMemory(num_rows, spec.max_repetition_window, torch.int32, -1, device)
            self.columns = StepColumns(COLUMNS, device, num_slots)
            self.device_stop_ids = torch.from_numpy(self.stop_ids).int().to(device)
        self.penalty = np.ones(num_rows + 1, np.float32)
        self.window = np.zeros(num_rows + 1, np.int64)
        self.least = np.zeros(num_rows + 1, np.int64)  # tokens before a stop id may come
        self.is_looking = np.zeros(num_rows + 1, np.bool_)  # rows that use any of it
        self._counts_prompt = np.zeros(num_rows + 1, np.bool_)
        self._num_looking = 0
        self._version = 0  # moves whenever one of them does
        self._rows: dict[int, HistoryRows] = {}  # by slot, -1 for eager steps

    @property
    def is_used(self) -> bool:
        """Whether some row looks back."""
        return self._num_looking > 0

    def write(self, row: int, config: SamplingReqConfig) -> None:
        """Takes a validated config without a None for master row ``row``.

        What the row's request has met stays as far as the new config still looks at it.  A window of another length
        starts empty.
        """
        if config.repetition_penalty == 1 and not config.min_tokens and not self.is_looking[row]:
            return
        penalty = min(max(config.repetition_penalty, LEAST_FACTOR), MOST_FACTOR)
        window = config.repetition_window if penalty != 1 else 0
        if penalty != 1 and window == 0:
            self.seen.lend(row)
        else:
            self.seen.release(row)
        if window:
            self.ring.lend(row, window != self.window[row])
        else:
            self.ring.release(row)
        self.penalty[row], self.window[row] = penalty, window
        self.least[row] = min(config.min_tokens, _MOST_COUNT)
        self._counts_prompt[row] = config.penalize_prompt
        self._look(row, penalty != 1 or config.min_tokens > 0)

    def clear(self, row: int) -> None:
        """The row is in nobody's use."""
        if self.is_looking[row]:
            self._look(row, False)
            self.seen.release(row)
            self.ring.release(row)
            self.penalty[row], self.window[row], self.least[row] = 1, 0, 0

    def meet_prompt(self, row: int, ids: np.ndarray) -> None:
        """Prompt ids int64 [n] of the row's request, for its presence penalty if that counts the prompt."""
        if self.is_looking[row] and self._counts_prompt[row]:
            self.seen.mark(row, ids)

    def reserve(self, max_bs: int) -> None:
        """Room for ``max_bs`` rows in every slot; may move it, so only before any capture."""
        if not self.on_host:
            self.columns.reserve(max_bs)
        self._rows.clear()

    def rows_of(self, addressed: np.ndarray, lease: SlotLease | None, is_capture: bool) -> HistoryRows | None:
        """What a step's rows look back at; None where none does.

        ``addressed`` int64 [padded bs]: master rows, the trash row for those that keep nothing.  Asked with the
        same object again, it answers the same while nothing changes.

        Raises:
            ValueError: a capture without the spec's ``vocab_size``.
        """
        if is_capture and self.has_seen and not self._has_width:
            raise ValueError("vocab_size must be given for a captured step to have a repetition penalty, got None")
        is_frozen = lease is not None and not self.on_host  # the graph looks back whatever its rows are
        if not (self.is_used or is_frozen):
            return None
        self.seen.settle()
        self.ring.settle()
        slot = -1 if lease is None else lease.slot
        rows = self._rows.get(slot)
        if rows is None or rows.addressed is not addressed or rows.version != self._version:
            rows = self._rows[slot] = self._rows_anew(addressed, lease)
        return None if rows.is_empty and not is_frozen else rows

    def _rows_anew(self, addressed: np.ndarray, lease: SlotLease | None) -> HistoryRows:
        if self.on_host:
            return HostRows(self, addressed, self._version)
        from mstar.engine.resources.sampler.device_history_rows import DeviceRows

        return DeviceRows(self, addressed, self._version, lease)

    def _look(self, row: int, looks: bool) -> None:
        if looks or self.is_looking[row]:
            self._num_looking += int(looks) - int(self.is_looking[row])
            self.is_looking[row] = looks
            self._version += 1
