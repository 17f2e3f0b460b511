"""One draw per row of logits on a GPU: the rule of :mod:`mstar.kernels.sampling`, without a host read.

Five kernels, all but the second over (rows, programs per row).  From the third on, a row that needs nothing of a kernel
costs it next to nothing, and the last program of a row to arrive combines what all found:

1. scan: the maximum of every chunk of tokens and, in rows without filters, a bound of what its noise may come to; in
   those with top-p alone, its mass in float32.
2. shortlist: maximum and faults of rows.  Greedy rows are done, rows without filters, from the few chunks that may have
   the winner, and those with a small top-k or nucleus, from a list of their best tokens.
3. survey: candidates of rows with a large nucleus; how many tokens lie where, in rows with a large top-k.
4. bracket: which candidate is the nucleus'; the score at which a large top-k ends.
5. race: noise for every token that the filters left, in rows that are not done; all results.
"""

from __future__ import annotations

import torch
import triton

from mstar.kernels.cuda.pdl import launch_options
from mstar.kernels.cuda.sampling_bracket import bracket_kernel
from mstar.kernels.cuda.sampling_near import MOST_CLOSE, MOST_NEAR
from mstar.kernels.cuda.sampling_nucleus import CANDIDATES
from mstar.kernels.cuda.sampling_race import race_kernel
from mstar.kernels.cuda.sampling_rules import STATE, SURVEY_BINS
from mstar.kernels.cuda.sampling_scan import scan_kernel
from mstar.kernels.cuda.sampling_shortlist import shortlist_kernel
from mstar.kernels.cuda.sampling_survey import survey_kernel
from mstar.kernels.sampling import RowSettings

# Tokens that a program looks at together: as many as its registers hold.
SCAN_TILE, SHORTLIST_TILE, SURVEY_TILE, BRACKET_TILE, RACE_TILE = 1024, 2048, 2048, 1024, 2048
SCAN_OPTIONS = {"num_warps": 4}
SHORTLIST_OPTIONS = {"num_warps": 8, "maxnreg": 128}  # one program per row, whose latency counts; two side by side
WIDE_OPTIONS = {"maxnreg": 128}  # most rows need nothing of these: many programs at once, to be gone
MOST_CHUNKS, LEAST_CHUNK = 4096, 32
SCAN_STAGES, SCAN_PROGRAMS = 3, 2640  # twice as many as run at once, each with two tiles on their way
PROGRAMS = 1024  # of a kernel, about: eight of 8 warps for each multiprocessor


class DeviceSampler:
    """:func:`mstar.kernels.sampling.sample_rows` on a GPU, for steps of one stream, one after the other."""

    def __init__(self, device: torch.device, max_rows: int) -> None:
        """``max_rows``: of the largest step."""
        self._arrivals, self._listed = (torch.zeros(max_rows, dtype=torch.int32, device=device) for _ in range(2))

    def __call__(
        self,
        logits: torch.Tensor,
        settings: RowSettings,
        apply_filters: bool,
        *,
        is_constrained: bool = False,
        index: torch.Tensor | None = None,
        advances: bool = False,
        last_tokens: torch.Tensor | None = None,
        overwritten: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws one token per row.

        Args:
            logits, settings, apply_filters, is_constrained: as there; ``settings`` on the logits' device.
            index: int64 [B], each row's place in ``settings.offset`` and ``last_tokens``; None: these are [B].
            advances: ``settings.offset`` grows by one at each row's place.
            last_tokens: int64, takes each row's token at its place.
            overwritten: int64 [B], takes what lay there.

        Returns:
            tokens int64 [B] and faults int8 [B], as there.
        """
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, vocab = logits.shape
        device = logits.device
        chunk = max(LEAST_CHUNK, triton.next_power_of_2(triton.cdiv(vocab, MOST_CHUNKS)))
        num_chunks = triton.cdiv(vocab, chunk)
        chunks = max(triton.next_power_of_2(num_chunks), 256)
        most_programs = triton.cdiv(vocab, RACE_TILE)
        padded = triton.next_power_of_2(most_programs)
        width = min(most_programs, triton.cdiv(PROGRAMS, rows))
        most_listed = max(triton.next_power_of_2(vocab) // 4, 1024)

        def scratch(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        states = scratch(torch.int64, rows, STATE)
        maxima, times, sums = (scratch(torch.float32, rows, chunks) for _ in range(3))
        close, near_tokens = scratch(torch.int32, rows, MOST_CLOSE), scratch(torch.int32, rows, MOST_NEAR)
        near_scores, near_masses = scratch(torch.float32, rows, MOST_NEAR), scratch(torch.int64, rows, MOST_NEAR)
        masses, counts = scratch(torch.int64, rows, width), scratch(torch.int32, rows, width, SURVEY_BINS)
        ranges, depths = scratch(torch.int32, rows, width, 3), scratch(torch.int32, rows, most_listed)
        above = scratch(torch.float32, rows, width, CANDIDATES)
        results, winners = scratch(torch.float32, rows, width), scratch(torch.int32, rows, width)
        tokens, faults = scratch(torch.int64, rows), scratch(torch.int8, rows)

        of, arrivals, stride, grid = settings, self._arrivals, logits.stride(0), (rows, width)
        options = launch_options(logits, num_warps=8, enable_fp_fusion=False)
        scan_kernel[rows, min(triton.cdiv(vocab, SCAN_TILE), triton.cdiv(SCAN_PROGRAMS, rows))](
            logits, stride, vocab, num_chunks, maxima, times, sums,
            of.temperature, of.top_k, of.top_p, of.min_p, of.top_p_first, of.seed, of.offset, index,
            APPLY_FILTERS=apply_filters, HAS_INDEX=index is not None, CHUNK=chunk, CHUNKS=chunks,
            TILE=SCAN_TILE, STAGES=SCAN_STAGES, **options | SCAN_OPTIONS,
        )  # fmt: skip
        shortlist_kernel[rows,](
            logits, stride, vocab, num_chunks, maxima, times, sums, states,
            of.temperature, of.top_k, of.top_p, of.min_p, of.top_p_first, of.top_p_min_keep, of.seed, of.offset, index,
            close, near_scores, near_masses, near_tokens, APPLY_FILTERS=apply_filters, IS_CONSTRAINED=is_constrained,
            HAS_INDEX=index is not None, CHUNK=chunk, CHUNKS=chunks, TILE=SHORTLIST_TILE,
            **options | SHORTLIST_OPTIONS,
        )  # fmt: skip
        if apply_filters:
            survey_kernel[grid](
                logits, stride, vocab, num_chunks, maxima, times, arrivals, states,
                of.temperature, of.top_k, of.top_p, of.top_p_first, of.top_p_min_keep, of.seed,
                near_scores, near_masses, near_tokens, masses, counts,
                CHUNK=chunk, CHUNKS=chunks, TILE=SURVEY_TILE, PROGRAMS=padded, **options | WIDE_OPTIONS,
            )  # fmt: skip
            bracket_kernel[grid](
                logits, stride, vocab, arrivals, self._listed, states,
                of.temperature, of.top_k, of.top_p, of.top_p_first, of.top_p_min_keep,
                near_scores, near_tokens, masses, ranges, depths, most_listed, above,
                TILE=BRACKET_TILE, PROGRAMS=padded, **options | WIDE_OPTIONS,
            )  # fmt: skip
        race_kernel[grid](
            logits, stride, vocab, maxima, arrivals, states, of.temperature, of.seed,
            results, winners, tokens, faults, of.offset, last_tokens, overwritten, index, ADVANCES=advances,
            HAS_LAST=last_tokens is not None, KEEPS=overwritten is not None, HAS_INDEX=index is not None,
            CHUNK=chunk, CHUNKS=chunks, TILE=RACE_TILE, PROGRAMS=padded, **options,
        )  # fmt: skip
        return tokens, faults
