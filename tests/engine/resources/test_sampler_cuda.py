"""The sampler in real graphs: a replay runs none of its Python, so state must move through tensors alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.runner import build_resources
from mstar.engine.resources.sampler import manager
from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep, SamplingReqConfig
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CAPACITY, BS, VOCAB = 8, 4, 1000
PADDING = tuple(-2 - i for i in range(BS))


def drawn_on_device(logits, settings, apply_filters, *, is_constrained):
    """A draw that a graph can hold: a token that tells seed and offset."""
    tokens = (settings.seed * 100 + settings.offset) % VOCAB
    return tokens, torch.zeros_like(tokens, dtype=torch.int8)


def likeliest_on_device(logits, settings, apply_filters, *, is_constrained):
    """Greedy, in a form that a graph can hold."""
    return logits.argmax(-1), torch.zeros(logits.shape[0], dtype=torch.int8, device=logits.device)


class Replays:
    """One captured bucket of ``BS`` rows with two slots, whose forward draws one token per row."""

    def __init__(self) -> None:
        device = torch.device("cuda")
        spec = SamplerSpec("sampler", {"LLM"}, VOCAB, max_repetition_window=4, min_tokens_stop_ids=(2, 9))
        info = EngineResourceInfo(device, torch.float32, torch.float32, CAPACITY, BS, num_slots=2)
        self.sampler = build_resources([spec], info)["sampler"]
        self.sampler.build_accelerator_graph_buffers([], BS, BS)
        self.row_of = {rid: CAPACITY + i for i, rid in enumerate(PADDING)}
        self.logits = torch.zeros(BS, VOCAB, device=device)
        self.graphs = [self.capture(slot) for slot in (0, 1)]
        self.slot = 0

    def context(self, rids, slot, capture=False):
        padded = (*rids, *PADDING)[:BS]
        rows = np.array([self.row_of[rid] for rid in padded], np.int64)
        lease = SlotLease(slot, BucketKey("decode", BS, BS))
        return StepContext(
            "decode", tuple(rids), rows, np.ones(BS, np.int64), padded, slot, capture=capture, slot_lease=lease
        )

    def capture(self, slot):
        ctx, stream = self.context((), slot, capture=True), torch.cuda.Stream()
        self.sampler.plan(SamplerStep(), ctx)
        with torch.cuda.stream(stream):
            self.sampler.sample(self.logits)
        stream.synchronize()
        self.sampler.plan(SamplerStep(), ctx)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = self.sampler.sample(self.logits)
        return graph, tokens

    def join(self, rid, row, **config):
        self.row_of[rid] = row
        self.sampler.ingest_request(rid, row, SamplingReqConfig(temperature=1.0, _seed=rid, **config))

    def leave(self, rid):
        self.sampler.remove_request(rid, self.row_of.pop(rid))

    def step(self, rids, kept=None, prompts=None):
        """Last tokens before, and tokens drawn: lists as long as ``rids``."""
        self.slot = 1 - self.slot
        graph, tokens = self.graphs[self.slot]
        step, ctx = SamplerStep(kept_rids=kept, prefill_tracked_tokens=prompts or {}), self.context(rids, self.slot)
        self.sampler.plan(step, ctx)
        last = self.sampler.loopback_tokens().clone()
        graph.replay()
        drawn = tokens.clone()
        self.sampler.commit(step, ctx)
        return last.tolist()[: len(rids)], drawn.tolist()[: len(rids)]


@pytest.fixture(params=["0", "1"], ids=["scatter-at-commit", "scatter-in-graph"])
def replays(request, monkeypatch):
    monkeypatch.setenv("MSTAR_SAMPLER_INGRAPH_SCATTER", request.param)
    monkeypatch.setattr(manager, "sample_rows", drawn_on_device)
    with torch.inference_mode():
        yield Replays()


def test_ten_replays_draw_at_ten_offsets_and_each_reads_what_the_last_drew(replays):
    replays.join(3, 5)
    replays.join(4, 0)
    before = [0, 0]
    for offset in range(10):
        last, drawn = replays.step([4, 3])
        assert last == before
        assert drawn == [400 + offset, 300 + offset]
        before = drawn
    assert replays.sampler._masters.offset[[5, 0]].tolist() == [10, 10]
    assert [replays.sampler.offset_of(row) for row in (5, 0)] == [10, 10]


def test_dropped_and_padding_rows_move_nothing_and_a_reused_row_starts_over(replays):
    replays.join(3, 5)
    replays.join(4, 0)
    replays.step([3, 4])
    replays.step([3, 4], kept=frozenset({4}))
    masters = replays.sampler._masters
    assert masters.offset[:CAPACITY].tolist() == [2, 0, 0, 0, 0, 1, 0, 0]
    assert masters.last_token[:CAPACITY].tolist() == [401, 0, 0, 0, 0, 300, 0, 0]
    replays.leave(3)
    replays.join(6, 5)
    assert replays.step([6]) == ([0], [600])
    assert replays.step([4, 6]) == ([401, 600], [402, 601])


def test_the_masters_and_every_slots_rows_stay_where_the_graphs_read_them(replays):
    sampler = replays.sampler
    replays.join(3, 5)

    def addresses():
        found = [sampler._masters.offset.data_ptr(), sampler._masters.last_token.data_ptr()]
        for slot in (0, 1):
            sampler.plan(SamplerStep(), replays.context([3], slot))
            planned = sampler._planned
            found += [planned.index.data_ptr(), *(column.data_ptr() for column in planned.settings.values())]
        return found

    first = addresses()
    for rid in range(10, 15):
        replays.join(rid, rid - 10)
        replays.step([rid, 3])
    assert addresses() == first


def test_replays_look_back_at_what_kept_rows_drew_and_reused_rows_start_clean(replays, monkeypatch):
    monkeypatch.setattr(manager, "sample_rows", likeliest_on_device)
    replays.graphs = [replays.capture(slot) for slot in (0, 1)]
    for value, token in ((10, 5), (9, 8), (8, 11), (7, 2)):
        replays.logits[:, token] = value
    replays.join(3, 5, repetition_penalty=2.0)
    replays.join(4, 0, repetition_penalty=1.1, repetition_window=3)
    replays.join(6, 1, min_tokens=2)
    drawn = [replays.step([3, 4, 6])[1] for _ in range(7)]
    assert [row[0] for row in drawn] == [5, 8, 11, 2, 5, 5, 5]
    assert [row[1] for row in drawn] == [5, 5, 8, 5, 5, 5, 8]
    assert [row[2] for row in drawn] == [5] * 7
    replays.step([3, 4, 6], kept=frozenset())
    replays.leave(3)
    replays.join(7, 5, repetition_penalty=2.0)
    replays.logits[:, 2] = 20
    assert replays.step([7, 6], prompts={7: torch.tensor([5, 2])})[1] == [2, 2]
    replays.leave(6)
    replays.join(8, 1, min_tokens=2)
    assert [replays.step([8])[1] for _ in range(3)] == [[5], [5], [2]]
