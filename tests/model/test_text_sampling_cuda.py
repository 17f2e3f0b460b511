"""The end of a text model's step on a GPU: the tokens that the CPU draws, with every feature in one batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.grammar.config import GrammarReqConfig, Vocabulary
from mstar.engine.resources.grammar.masks import SlotMasks, num_words
from mstar.engine.resources.logit_edits.config import LogitEditsReqConfig
from mstar.engine.resources.logprobs.config import LogprobsReqConfig
from mstar.engine.resources.runner import StepRunner, build_resources
from mstar.engine.resources.sampler.config import SamplerStep, SamplingReqConfig
from mstar.engine.resources.sampler.history import History
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext, SubmoduleStep
from mstar.model.text_sampling import FULL, sample, sampling_specs, sampling_steps

VOCAB, STEPS, EOS = 512, 12, 0
PIECES = [b"", *(bytes([i]) for i in range(1, 256)), *(str(i).encode() for i in range(256, VOCAB))]
IDS = np.arange(40, 90)


def sampled(seed: int, **settings: object) -> SamplingReqConfig:
    config = SamplingReqConfig(**({"temperature": 1.0} | settings))  # type: ignore[arg-type]
    config.apply_conductor_config(seed=seed)
    return config


GREEDY = SamplingReqConfig(temperature=0)
BS = 12
ROWS = [
    {"sampler": GREEDY},
    {"sampler": sampled(1)},
    {"sampler": sampled(2, top_k=20, top_p=0.9, min_p=0.02)},
    {"sampler": SamplingReqConfig(temperature=0, repetition_penalty=1.5)},
    {"sampler": SamplingReqConfig(temperature=0, repetition_penalty=1.5, repetition_window=3)},
    {"sampler": sampled(3, min_tokens=6)},
    {"sampler": GREEDY, "logit_edits": LogitEditsReqConfig(presence_penalty=1.0, frequency_penalty=0.5)},
    {"sampler": sampled(4), "logit_edits": LogitEditsReqConfig(allowed_ids=IDS, bad_words=((50,), (51, 52)))},
    {"sampler": GREEDY, "grammar": GrammarReqConfig(kind="regex", text="([0-9]{2} )+x")},
    {"sampler": sampled(5), "logprobs": LogprobsReqConfig(num_top=5)},
]


class Player:
    """Steps of all rows on one device, from the same logits on every device; with ``is_captured`` as replays of a graph
    per slot, whose bucket has room for more rows; with ``is_interpreted`` on the CPU by the kernels of a device."""

    def __init__(self, device: str, is_captured: bool = False, is_interpreted: bool = False) -> None:
        specs = sampling_specs({"LLM"}, VOCAB, (EOS,), lambda: Vocabulary(PIECES, special_ids=(EOS,), eos_ids=(EOS,)))
        info = EngineResourceInfo(torch.device(device), torch.float32, torch.float32, len(ROWS), BS, 2)
        self.device = device
        self.resources = build_resources(specs, info)
        if is_interpreted:
            self._use_kernels(specs, info)
        self.runner = StepRunner(self.resources, specs)
        self.step = SubmoduleStep(steps=sampling_steps(SamplerStep(), FULL), cg_key_info=FULL)
        for resource in self.resources.values():
            resource.build_accelerator_graph_buffers([], BS, BS)
        self.logits = torch.zeros(BS, VOCAB, device=device)
        self.graphs = [self._capture(slot) for slot in (0, 1)] if is_captured else []
        for row, configs in enumerate(ROWS):
            for key, resource in self.resources.items():
                resource.ingest_request(row, row, configs.get(key))

    def _use_kernels(self, specs: list[Any], info: EngineResourceInfo) -> None:
        """All but the draw itself."""
        from mstar.engine.resources.logit_edits.device import DeviceLogitEdits
        from mstar.engine.resources.logprobs.device import DeviceLogprobs

        by_key = {spec.resource_key: spec for spec in specs}
        sampler = self.resources["sampler"]
        sampler._history = History(by_key["sampler"], sampler._masters.num_rows, info.device, 2, on_host=False)
        self.resources["grammar"]._slots = SlotMasks(num_words(VOCAB), info.device, 2)
        self.resources |= {
            "logprobs": DeviceLogprobs(by_key["logprobs"], info),
            "logit_edits": DeviceLogitEdits(by_key["logit_edits"], info),
        }

    def context(self, num_real: int, slot: int, capture: bool = False) -> StepContext:
        ids = (*range(num_real), *(-2 - i for i in range(BS - num_real)))
        rows = np.array([i if i >= 0 else len(ROWS) - 2 - i for i in ids])
        lease = SlotLease(slot, BucketKey("decode", BS, BS, FULL))
        return StepContext("decode", ids[:num_real], rows, np.ones(BS), ids, slot, capture, slot_lease=lease)

    def _capture(self, slot: int) -> tuple[torch.cuda.CUDAGraph, dict[str, torch.Tensor]]:
        ctx, stream = self.context(0, slot, capture=True), torch.cuda.Stream()
        for _ in range(2):
            self.runner.plan(self.step, ctx)
            with torch.cuda.stream(stream):
                sample(self.resources, self.logits, FULL)
            stream.synchronize()
        self.runner.plan(self.step, ctx)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = sample(self.resources, self.logits, FULL)
        self.runner.abandon(self.step, ctx)
        return graph, outputs

    def run(self, number: int, logits: torch.Tensor) -> dict[str, np.ndarray]:
        rows = np.arange(len(ROWS))
        if self.graphs:
            graph, outputs = self.graphs[number % 2]
            ctx = self.context(len(ROWS), number % 2)
            self.runner.plan(self.step, ctx)
            self.logits[: len(ROWS)] = logits.to(self.device)
            graph.replay()
        else:
            ctx = StepContext("decode", tuple(rows.tolist()), rows, np.ones(rows.size, np.int64))
            self.runner.plan(self.step, ctx)
            outputs = sample(self.resources, logits.to(self.device), FULL)
        told = {name: value[: len(ROWS)].cpu().numpy() for name, value in outputs.items()}
        self.runner.commit(self.step, ctx)
        self.resources["grammar"].accept_tokens(rows, told["new_token"])
        return told


def play(device: str, **options: bool) -> list[dict[str, np.ndarray]]:
    """What every step tells."""
    random = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        player = Player(device, **options)
        return [player.run(i, torch.randn(len(ROWS), VOCAB, generator=random) * 3) for i in range(STEPS)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
def test_a_gpu_draws_the_tokens_of_the_cpu_with_every_feature_in_one_batch(is_captured: bool) -> None:
    assert_alike(play("cuda", is_captured=is_captured), play("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_the_kernels_of_a_device_lead_to_the_tokens_of_the_cpu() -> None:
    pytest.importorskip("triton")
    assert_alike(play("cpu", is_interpreted=True), play("cpu"))


def assert_alike(on_device: list[dict[str, np.ndarray]], on_cpu: list[dict[str, np.ndarray]]) -> None:
    for told, wanted in zip(on_device, on_cpu, strict=True):
        for name in ("new_token", "fault", "logprob_rank", "top_ids"):
            assert told[name].tolist() == wanted[name].tolist(), name
        for name in ("logprob", "top_logprobs"):
            np.testing.assert_allclose(told[name], wanted[name], atol=1e-5)


def test_the_features_of_the_batch_show_in_its_tokens() -> None:
    told = np.stack([outputs["new_token"] for outputs in play("cpu")])
    assert EOS not in told[:6, 5]
    assert set(told[:, 7].tolist()) <= set(IDS.tolist()) - {50}
    text = b"".join(PIECES[token] for token in told[:, 8].tolist())
    assert text.replace(b" ", b"").rstrip(b"x").isdigit()
    assert len(set(told[:, 3].tolist())) > 8, "no token comes again soon"
