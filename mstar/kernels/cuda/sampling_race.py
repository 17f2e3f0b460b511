"""Last pass: the exponential race of rows with many tokens left, and every row's result."""

from __future__ import annotations

import triton
import triton.language as tl

from mstar.kernels.cuda.pdl import release_dependents, wait_for_inputs
from mstar.kernels.cuda.sampling_rules import (
    BEST,
    FAULT,
    FLOOR,
    MAX_NOISE,
    NO_TOKEN,
    OFFSET,
    PEAK,
    PHASE,
    RACE,
    SETTINGS,
    STATE,
    TOKEN,
    float_of,
    is_last_of,
    may_reach,
    neg_log_noise,
    neg_log_noise_of,
    philox_word,
    scaled_scores,
)


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def race_kernel(
    logits, row_stride, vocab, maxima, arrivals, states, temperatures, seeds,
    results, winners, tokens, faults, offsets, last_tokens, overwritten, index,
    ADVANCES: tl.constexpr, HAS_LAST: tl.constexpr, KEEPS: tl.constexpr, HAS_INDEX: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, programs per row).  Each program's best: ``results`` fp32 and ``winners`` int32 [rows, programs].

    Writes ``tokens`` int64 and ``faults`` int8 [rows] and, where asked for, the next offset and the token to the
    row's place in ``offsets`` and ``last_tokens``: ``index[row]``, or ``row`` itself; ``overwritten`` [rows] keeps the
    token that lay there.
    """
    release_dependents(USE_PDL)
    wait_for_inputs(USE_PDL)
    row, program, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    state = states + row * STATE
    token = tl.load(state + TOKEN).to(tl.int32)
    races = tl.load(state + PHASE) == RACE
    is_last = program == 0
    if races:
        peak, floor = float_of(tl.load(state + PEAK)), float_of(tl.load(state + FLOOR))
        seed, offset, best = tl.load(seeds + row), tl.load(state + OFFSET), tl.load(state + BEST).to(tl.int32)
        temperature = tl.maximum(tl.load(temperatures + row), 1e-30)
        rate = 1 / temperature
        most = neg_log_noise(seed, offset, best)  # the best result known so far: the likeliest token's own, at first
        x_row = logits + row.to(tl.int64) * row_stride
        result = tl.full((TILE,), float("-inf"), tl.float32)
        winner = tl.full((TILE,), NO_TOKEN, tl.int32)
        lane, chunk = tl.arange(0, TILE), tl.arange(0, TILE // CHUNK)
        for tile in range(program, tl.cdiv(vocab, TILE), programs):
            start = tile * TILE // CHUNK + chunk
            top = tl.load(maxima + row * CHUNKS + start, mask=start * CHUNK < vocab, other=float("-inf"))
            # Noise adds at most MAX_NOISE: a tile whose best score lies further below what is known is out.
            if scaled_scores(tl.max(top), peak, temperature) >= tl.maximum(floor, most - MAX_NOISE):
                at = tile * TILE + lane
                x = tl.load(x_row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
                word = philox_word(seed, offset, at)
                # Exact scores and noise take longer than the words, and few tiles have a token that needs them.
                if tl.max(may_reach(word, (x - peak) * rate, most).to(tl.int32)) > 0:
                    scores = scaled_scores(x, peak, temperature)
                    own = tl.where(scores >= floor, scores + neg_log_noise_of(word), float("-inf"))
                    is_better = own > result  # ids rise from tile to tile: the lowest stays on ties
                    result = tl.where(is_better, own, result)
                    winner = tl.where(is_better, at, winner)
                    most = tl.maximum(most, tl.max(own))
        own_most = tl.max(result)
        share = row * programs + program
        tl.store(results + share, own_most)
        tl.store(winners + share, tl.min(tl.where(result == own_most, winner, NO_TOKEN)))
        is_last = is_last_of(arrivals, row, programs)
        if is_last:
            others = tl.arange(0, PROGRAMS)
            is_one, at = others < programs, row * programs + others
            own = tl.load(results + at, mask=is_one, other=float("-inf"), cache_modifier=".cg")
            winner_of = tl.load(winners + at, mask=is_one, other=NO_TOKEN, cache_modifier=".cg")
            token = tl.min(tl.where(own == tl.max(own), winner_of, NO_TOKEN))
    if is_last:
        tl.store(tokens + row, token)
        tl.store(faults + row, tl.load(state + FAULT))
        place = row.to(tl.int64)
        if HAS_INDEX:
            place = tl.load(index + row)
        if ADVANCES:
            tl.store(offsets + place, tl.load(state + OFFSET) + 1)
        if KEEPS:
            tl.store(overwritten + row, tl.load(last_tokens + place))
            tl.debug_barrier()  # every thread has loaded it before one stores the next
        if HAS_LAST:
            tl.store(last_tokens + place, token)
