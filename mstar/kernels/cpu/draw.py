"""The draw on CPUs with AVX2 or AVX-512: one pass per row in cache, with tokens equal to the torch reference's.

The kernel narrows each row down to the tokens that may win the race, nearly always one.  Among several, the
reference's own formula decides.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from mstar.kernels import sampling
from mstar.kernels.cpu.draw_ir import ROW, module_ir, scratch_bytes
from mstar.kernels.cpu.jit import Worker, make_or_warn, vector_lanes, words
from mstar.kernels.cpu.race_ir import CANDIDATES
from mstar.kernels.sampling import RowSettings


def sample_rows(
    logits: torch.Tensor, settings: RowSettings, apply_filters: bool, *, is_constrained: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`sampling.sample_rows`, by the kernel where it can be made."""
    draw: sampling.Draw = draw_kernel() or sampling.draw_rows
    return sampling.sample_rows(logits, settings, apply_filters, draw, is_constrained=is_constrained)


@functools.cache
def draw_kernel() -> DrawKernel | None:
    """The kernel, compiled once per process in about 0.1 s; None, with a warning, where it cannot be made."""
    return make_or_warn("sampling", DrawKernel)


class DrawKernel:
    """Called as :func:`sampling.draw_rows`, with the same result.  Calls may come from several threads."""

    def __init__(self) -> None:
        self._lanes = vector_lanes()
        self._worker = Worker(module_ir(self._lanes))

    def __call__(
        self, x: torch.Tensor, rows: np.ndarray, best: np.ndarray, settings: RowSettings, apply_filters: bool
    ) -> np.ndarray:
        x = x.contiguous()
        records = _records(x, rows, best, settings, apply_filters)
        self._narrow(records, x.shape[1])
        count, tokens = records["num_candidates"], records["candidates"][:, 0].copy()
        several = np.flatnonzero((count > 1) & (count <= CANDIDATES))
        if several.size:
            tokens[several] = _decide(x.numpy(), rows[several], records[several])
        many = np.flatnonzero(count > CANDIDATES)
        if many.size:
            index = torch.from_numpy(many)
            chosen = RowSettings(*(column[index] for column in settings))
            tokens[many] = sampling.draw_rows(x, rows[many], best[many], chosen, apply_filters)
        return tokens

    def _narrow(self, records: np.ndarray, vocab: int) -> None:
        """Fills in each record's candidates."""
        threads = min(torch.get_num_threads(), records.size)
        stride = scratch_bytes(vocab, self._lanes)
        scratch = torch.empty(threads * stride, dtype=torch.uint8)
        self._worker(words(records.ctypes.data, records.size, vocab, scratch.data_ptr(), stride), threads)


def _records(
    x: torch.Tensor, rows: np.ndarray, best: np.ndarray, settings: RowSettings, apply_filters: bool
) -> np.ndarray:
    """What the kernel needs to know of each row."""
    vocab = x.shape[1]
    records = np.empty(rows.size, ROW)
    records["logits"] = x.data_ptr() + rows * (4 * vocab)
    records["peak"] = x.numpy()[rows, best]
    records["seed"], records["offset"] = settings.seed.numpy(), settings.offset.numpy()
    records["temperature"] = settings.temperature.clamp(min=1e-30).numpy()
    records["floor"] = settings.min_p.log().numpy()
    top_k, top_p = settings.top_k.numpy(), settings.top_p.double().numpy()
    records["top_k"] = np.where(apply_filters & (top_k > 0), top_k, vocab)
    records["top_p"] = top_p = np.where(apply_filters & (top_p < 1), top_p, 1.0)
    records["top_p_first"] = settings.top_p_first.numpy()
    records["min_keep"] = min_keep = np.maximum(settings.top_p_min_keep.numpy(), 1)
    # V tokens below log((1 - p) / V) have less than 1 - p of the mass of the best one alone.
    with np.errstate(divide="ignore"):
        reach = np.log((1 - top_p) / vocab) - 0.01
    records["reach"] = np.where(min_keep == 1, reach, -np.inf)
    return records


def _decide(x: np.ndarray, rows: np.ndarray, records: np.ndarray) -> np.ndarray:
    """The winners among the candidates of ``records``, by the reference's formula: int64 [R]."""
    counts = records["num_candidates"]
    token = records["candidates"][np.arange(CANDIDATES) < counts[:, None]]
    of = np.repeat(np.arange(counts.size), counts)
    scores = (x[rows[of], token] - records["peak"].astype(np.float32)[of]) / records["temperature"].astype(np.float32)[
        of
    ]
    results = scores + sampling.neg_log_noise(records["seed"][of], records["offset"][of], token)
    return token[sampling.first_best(results, counts)]
