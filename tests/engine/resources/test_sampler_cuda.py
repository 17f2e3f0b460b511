"""The sampler in real graphs: a replay runs none of its Python, so state must move through tensors alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.runner import build_resources
from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep, SamplingReqConfig
from mstar.engine.resources.sampler.masters import DrawMasters
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext
from mstar.kernels import sampling
from mstar.kernels.sampling import RowSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CAPACITY, BS, VOCAB = 8, 4, 1000
PADDING = tuple(-2 - i for i in range(BS))


def expected(logits, seed, offset):
    """What the reference draws from one row of logits, at temperature 1."""
    one = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_p_first": False, "top_p_min_keep": 1}
    columns = [torch.tensor([value]) for value in one.values()]
    settings = RowSettings(*columns, seed=torch.tensor([seed]), offset=torch.tensor([offset]))
    return sampling.sample_rows(logits.cpu()[None], settings, True)[0].item()


class Replays:
    """One captured bucket of ``BS`` rows with two slots, whose forward draws one token per row."""

    def __init__(self) -> None:
        device = torch.device("cuda")
        spec = SamplerSpec("sampler", {"LLM"}, VOCAB, max_repetition_window=4, min_tokens_stop_ids=(2, 9))
        info = EngineResourceInfo(device, torch.float32, torch.float32, CAPACITY, BS, num_slots=2)
        self.sampler = build_resources([spec], info)["sampler"]
        self.sampler.build_accelerator_graph_buffers([], BS, BS)
        self.row_of = {rid: CAPACITY + i for i, rid in enumerate(PADDING)}
        row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
        self.logits = row.to(device).repeat(BS, 1)
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
            self.forward()
        stream.synchronize()
        self.sampler.plan(SamplerStep(), ctx)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            last, tokens = self.forward()
        return graph, last, tokens

    def forward(self):
        """The last tokens that it read itself, if it does, and those drawn."""
        read = self.sampler.last_tokens_in_graph()
        last = None if read is None else read[0].index_select(0, read[1])
        return last, self.sampler.sample(self.logits.clone())  # which may be changed, as penalties do

    def expected(self, seed, offset):
        return expected(self.logits[0], seed, offset)

    def join(self, rid, row, **config):
        self.row_of[rid] = row
        config = {"temperature": 1.0, "_seed": rid} | config
        self.sampler.ingest_request(rid, row, SamplingReqConfig(**config))

    def leave(self, rid):
        self.sampler.remove_request(rid, self.row_of.pop(rid))

    def step(self, rids, kept=None, prompts=None, fails=False):
        """Last tokens before, and tokens drawn: lists as long as ``rids``."""
        self.slot = 1 - self.slot
        graph, last, tokens = self.graphs[self.slot]
        step, ctx = SamplerStep(kept_rids=kept, prefill_tracked_tokens=prompts or {}), self.context(rids, self.slot)
        self.sampler.plan(step, ctx)
        if last is None:
            last = self.sampler.loopback_tokens().clone()
        graph.replay()
        drawn = tokens.clone()
        (self.sampler.abandon if fails else self.sampler.commit)(step, ctx)
        return last.tolist()[: len(rids)], drawn.tolist()[: len(rids)]


@pytest.fixture(params=["00", "01", "10", "11"], ids=lambda knobs: f"scatter{knobs[0]}-tokens{knobs[1]}")
def replays(request, monkeypatch):
    monkeypatch.setenv("MSTAR_SAMPLER_INGRAPH_SCATTER", request.param[0])
    monkeypatch.setenv("MSTAR_INGRAPH_DECODE_TOKENS", request.param[1])
    with torch.inference_mode():
        yield Replays()


def test_ten_replays_draw_at_ten_offsets_and_each_reads_what_the_last_drew(replays):
    replays.join(3, 5)
    replays.join(4, 0)
    before = [0, 0]
    for offset in range(10):
        last, drawn = replays.step([4, 3])
        assert last == before
        assert drawn == [replays.expected(4, offset), replays.expected(3, offset)]
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
    of = replays.expected
    assert masters.last_token[:CAPACITY].tolist() == [of(4, 1), 0, 0, 0, 0, of(3, 0), 0, 0]
    replays.leave(3)
    replays.join(6, 5)
    assert replays.step([6]) == ([0], [of(6, 0)])
    assert replays.step([4, 6]) == ([of(4, 1), of(6, 0)], [of(4, 2), of(6, 1)])


def test_an_abandoned_replay_runs_again_with_the_same_result(replays):
    replays.join(3, 5)
    replays.join(4, 0)
    replays.step([3, 4])
    first = replays.step([3, 4], fails=True)
    masters = replays.sampler._masters
    assert masters.offset[[5, 0]].tolist() == [1, 1]
    assert replays.step([3, 4]) == first
    assert masters.offset[[5, 0]].tolist() == [2, 2]


def test_replays_back_to_back_need_no_plan_between_them_where_the_sampler_says_so(replays):
    replays.join(3, 5)
    replays.step([3])
    step, ctx = SamplerStep(), replays.context([3], 0)
    replays.sampler.plan(step, ctx)
    repeats = replays.sampler.repeats_in_graph(step, ctx)
    assert repeats == (replays.sampler._scatters_in_graph and replays.sampler._reads_in_graph)
    if repeats:
        graph, last, tokens = replays.graphs[0]
        for offset in (1, 2, 3):
            graph.replay()
            assert (last[0], tokens[0]) == (replays.expected(3, offset - 1), replays.expected(3, offset))


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


def test_replays_look_back_at_what_kept_rows_drew_and_reused_rows_start_clean(replays):
    replays.logits.zero_()
    for value, token in ((10, 5), (9, 8), (8, 11), (7, 2)):
        replays.logits[:, token] = value
    replays.join(3, 5, temperature=0.0, repetition_penalty=2.0)
    replays.join(4, 0, temperature=0.0, repetition_penalty=1.1, repetition_window=3)
    replays.join(6, 1, temperature=0.0, min_tokens=2)
    drawn = [replays.step([3, 4, 6])[1] for _ in range(7)]
    assert [row[0] for row in drawn] == [5, 8, 11, 2, 5, 5, 5]
    assert [row[1] for row in drawn] == [5, 5, 8, 5, 5, 5, 8]
    assert [row[2] for row in drawn] == [5] * 7
    replays.step([3, 4, 6], kept=frozenset())
    replays.leave(3)
    replays.join(7, 5, temperature=0.0, repetition_penalty=2.0)
    replays.logits[:, 2] = 20
    assert replays.step([7, 6], prompts={7: torch.tensor([5, 2])})[1] == [2, 2]
    replays.leave(6)
    replays.join(8, 1, temperature=0.0, min_tokens=2)
    assert [replays.step([8])[1] for _ in range(3)] == [[5], [5], [2]]


@pytest.mark.parametrize("slot", [None, 1])
def test_rows_of_new_requests_restart_without_waiting_for_the_device(slot):
    masters = DrawMasters(6, torch.device("cuda"), num_slots=2)
    masters.reserve(8)
    rows = torch.arange(6, device="cuda")
    masters.scatter(rows, torch.full_like(rows, 3), torch.full_like(rows, 5))
    lease = None if slot is None else SlotLease(slot, BucketKey("decode", 8, 8))
    torch.cuda.set_sync_debug_mode("error")
    try:
        masters.restart([1, 4], lease)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert masters.offset[:6].tolist() == [3, 0, 3, 3, 0, 3]
    assert masters.last_token[:6].tolist() == [5, 0, 5, 5, 0, 5]
