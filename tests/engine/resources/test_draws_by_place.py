"""What a seeded request draws depends on its seed, its draws so far and its logits: not on its row, its place in the
batch or the batch's size, and not on whether the step is eager, captured or the CPU's."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.runner import build_resources
from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep, SamplingReqConfig
from mstar.engine.resources.sampler.manager import SamplerManager
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext

VOCAB, DRAWS, TIED = 700, 2, (5, 9)
SPEC = SamplerSpec("sampler", {"LLM"}, VOCAB, enable_min_p=True, enable_top_p_first=True)
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 200, "top_p": 0.5, "top_p_first": True},
]
NUM_TIED = 2  # the first settings, which take the largest logit


def seed_of(request: int) -> int:
    return (request * 0x9E3779B97F4A7C15 + 1) % 2**63


def logits_of(request: int, draw: int) -> torch.Tensor:
    """float32 [VOCAB]; two largest ones where the request takes the largest."""
    generator = torch.Generator().manual_seed(100 * request + draw)
    logits = torch.randn(VOCAB, generator=generator) * 3
    if request % len(SETTINGS) < NUM_TIED:
        logits[list(TIED)] = logits.max() + 1
    return logits


class Sampler:
    """One engine's sampler for steps of up to ``size`` requests, in a bucket with room for one more.

    ``way``: reference is the CPU's own, eager the kernels of a device (without a GPU, in Triton's interpreter), and
    captured these in a graph.
    """

    def __init__(self, way: str, size: int) -> None:
        self.device = torch.device("cuda" if way != "reference" and torch.cuda.is_available() else "cpu")
        self.size, self.bs = size, size + 1
        info = EngineResourceInfo(self.device, torch.float32, torch.float32, 2 * size, 3 * size + 1, num_slots=2)
        sampler = build_resources([SPEC], info)["sampler"]
        assert isinstance(sampler, SamplerManager)
        self.sampler = sampler
        if way == "eager" and self.device.type == "cpu":
            from mstar.kernels.cuda.sampling import DeviceSampler

            sampler._device_sampler = DeviceSampler(self.device, self.bs)
        sampler.build_accelerator_graph_buffers([], self.bs, self.bs)
        for i in range(self.bs):
            sampler.ingest_request(-2 - i, 2 * size + i, None)
        self.logits = torch.zeros(self.bs, VOCAB, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if way == "captured":
            self._capture()

    def _context(self, requests: list[int], rows: list[int], capture: bool = False) -> StepContext:
        padding = range(self.bs - len(requests))
        ids = (*requests, *(-2 - i for i in padding))
        every = np.array([*rows, *(2 * self.size + i for i in padding)], np.int64)
        lease = SlotLease(0, BucketKey("decode", self.bs, self.bs))
        spans = np.ones(self.bs, np.int64)
        return StepContext("decode", tuple(requests), every, spans, ids, 0, capture, slot_lease=lease)

    def _capture(self) -> None:
        ctx, stream = self._context([], [], capture=True), torch.cuda.Stream()
        for _ in range(2):
            self.sampler.plan(SamplerStep(), ctx)
            with torch.cuda.stream(stream):
                self.sampler.sample(self.logits)
            stream.synchronize()
        self.sampler.plan(SamplerStep(), ctx)
        self.graph = torch.cuda.CUDAGraph()
        gc.collect()  # the end of some page-locked memory would break a capture
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.tokens = self.sampler.sample(self.logits)
        self.sampler.abandon(SamplerStep(), ctx)

    def draw(self, requests: list[int], rows: list[int]) -> list[list[int]]:
        """The tokens of each of these requests, which stand on these master rows, in this order."""
        for request, row in zip(requests, rows, strict=True):
            settings = SETTINGS[request % len(SETTINGS)]
            self.sampler.ingest_request(request, row, SamplingReqConfig(**settings, _seed=seed_of(request)))
        drawn = [self._step(requests, rows, draw) for draw in range(DRAWS)]
        for request, row in zip(requests, rows, strict=True):
            self.sampler.remove_request(request, row)
        return [list(tokens) for tokens in zip(*drawn, strict=True)]

    def _step(self, requests: list[int], rows: list[int], draw: int) -> list[int]:
        ctx, step = self._context(requests, rows), SamplerStep()
        self.sampler.plan(step, ctx)
        self.logits[: len(requests)] = torch.stack([logits_of(request, draw) for request in requests]).to(self.device)
        if self.graph is None:
            tokens = self.sampler.sample(self.logits)
        else:
            self.graph.replay()
            tokens = self.tokens
        told = tokens[: len(requests)].tolist()
        self.sampler.commit(step, ctx)
        return told


def has_interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize(
    ("way", "sizes"),
    [
        pytest.param("reference", (3, 16), id="cpu"),
        pytest.param("eager", (4,), id="interpreted"),
        pytest.param("eager", (1, 5, 17, 64, 128), marks=pytest.mark.gpu, id="gpu-eager"),
        pytest.param("captured", (1, 5, 17, 64, 128), marks=pytest.mark.gpu, id="gpu-captured"),
    ],
)
@pytest.mark.parametrize("scatter", ["0", "1"])
def test_draws_are_those_of_the_request_alone_on_the_cpu(
    way: str, sizes: tuple[int, ...], scatter: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = request.node.get_closest_marker("gpu") is not None
    if on_gpu and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if way == "eager" and not on_gpu and not has_interpreter():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    monkeypatch.setenv("MSTAR_SAMPLER_INGRAPH_SCATTER", scatter)
    random, count = np.random.default_rng(0), max(len(SETTINGS), *sizes)
    with torch.inference_mode():
        alone = Sampler("reference", 1)
        wanted = [alone.draw([number], [number % 2])[0] for number in range(count)]
        for size in sizes:
            sampler = Sampler(way, size)
            for _ in range(2):  # other places and other rows
                requests = random.permutation(count)[:size].tolist()
                rows = random.permutation(2 * size)[:size].tolist()
                assert sampler.draw(requests, rows) == [wanted[number] for number in requests]
    takes_largest = [number for number in range(count) if number % len(SETTINGS) < NUM_TIED]
    assert all(wanted[number] == [min(TIED)] * DRAWS for number in takes_largest)
