"""What a run of ``mstar bench offline`` asks of the engine: prompts, lengths, sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mstar.conductor.request import EngineRequest

W3_REQUESTS, W3_LOW, W3_HIGH, W3_TEMPERATURE = 256, 100, 1024, 0.6


class Sampling(NamedTuple):
    """As a request's parameters of these names; the defaults are greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def text(self) -> str:
        if not self.temperature:
            return "greedy"
        filters = [f"top-p {self.top_p:g}"] * (self.top_p < 1) + [f"top-k {self.top_k}"] * (self.top_k > 0)
        return ", ".join([f"temperature {self.temperature:g}", *filters])


GREEDY = Sampling()


@dataclass(frozen=True)
class Workload:
    """Requests that are submitted all at once; none ends before its ``output_lens`` int64 [rows] are full."""

    prompts: list[np.ndarray]  # int32 [tokens] each
    output_lens: np.ndarray
    sampling: Sampling = GREEDY

    @property
    def rows(self) -> int:
        return len(self.prompts)

    def requests(self) -> list[EngineRequest]:
        """One for each prompt; draws are seeded by its place."""
        return [
            EngineRequest(
                prompt_ids=prompt.tobytes(),
                max_tokens=length,
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                top_k=self.sampling.top_k,
                seed=row,
                ignore_eos=True,
            )
            for row, (prompt, length) in enumerate(zip(self.prompts, self.output_lens.tolist(), strict=True))
        ]


def equal_rows(
    rows: int, input_len: int, output_len: int, vocab_size: int, seed: int, sampling: Sampling = GREEDY
) -> Workload:
    """``rows`` random prompts of one length."""
    ids = np.random.default_rng(seed).integers(1, vocab_size, size=(rows, input_len), dtype=np.int64).astype("<i4")
    return Workload(list(ids), np.full(rows, output_len), sampling)


def w3(vocab_size: int, requests: int = W3_REQUESTS, low: int = W3_LOW, high: int = W3_HIGH) -> Workload:
    """Prompts and outputs of uniformly distributed lengths, ``low`` to ``high`` tokens, the same ones every time."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(low, high, size=(requests, 2), endpoint=True)
    prompts = [rng.integers(1, vocab_size, size=length, dtype=np.int64).astype("<i4") for length in lengths[:, 0]]
    return Workload(prompts, lengths[:, 1], Sampling(W3_TEMPERATURE))
