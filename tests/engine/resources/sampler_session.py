"""A sampler alone, driven through steps as the engine does."""

from functools import cache

import numpy as np
import pytest
import torch

from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.row_memory import RowMemory
from mstar.engine.resources.runner import build_resources
from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep, SamplingReqConfig
from mstar.engine.resources.sampler.history import History
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext

VOCAB, CAPACITY = 97, 8
STOP_IDS = (3, 50)
SPEC = SamplerSpec(
    "sampler",
    {"LLM"},
    VOCAB,
    enable_min_p=True,
    max_repetition_window=16,
    min_tokens_stop_ids=STOP_IDS,
    enable_top_p_first=True,
)
PLAIN = SamplerStep()
SAMPLED = SamplingReqConfig(temperature=1.0, _seed=5)
SCATTER = "MSTAR_SAMPLER_INGRAPH_SCATTER"
PATHS = pytest.mark.parametrize(
    ("in_graph", "slot"),
    [
        pytest.param(False, None, id="eager"),
        pytest.param(False, 0, id="leased"),
        pytest.param(True, None, id="in-graph-eager"),
        pytest.param(True, 0, id="in-graph"),
    ],
)


@cache
def logits_of(rid, draw):
    """What the model says for a request's ``draw``-th token: fixed by the two."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * abs(rid) + draw)) * 3


class Session:
    """A sampler alone, fed with each request's own logits.  Requests are master rows 0 .. 7, padding rows 8 .. 15."""

    def __init__(self, in_graph=False, slots="64", *, spec=SPEC, on_host=True, draws_on_device=False):
        info = EngineResourceInfo(torch.device("cpu"), torch.float32, torch.float32, CAPACITY, CAPACITY, num_slots=2)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(SCATTER, str(int(in_graph)))
            environment.setenv("MSTAR_SAMPLER_SLOTS", slots)
            self.sampler = build_resources([spec], info)["sampler"]
        if not on_host:  # the kernels of histories, in Triton's interpreter
            args = (spec, self.sampler._masters.num_rows, torch.device("cpu"), 2)
            self.sampler._history = History(*args, on_host=False)
        if draws_on_device:  # as above
            from mstar.kernels.cuda.sampling import DeviceSampler

            self.sampler._device_sampler = DeviceSampler(torch.device("cpu"), 2 * CAPACITY)
        self.sampler.build_accelerator_graph_buffers([], CAPACITY, CAPACITY)
        self.row_of = {-2 - i: CAPACITY + i for i in range(CAPACITY)}
        for rid, row in self.row_of.items():
            self.sampler.ingest_request(rid, row, None)
        self.tokens = {}

    def join(self, rid, row, config=SAMPLED):
        self.row_of[rid] = row
        self.sampler.ingest_request(rid, row, config)
        self.tokens.setdefault(rid, [])

    def leave(self, rid):
        self.sampler.remove_request(rid, self.row_of.pop(rid))
        self.tokens.pop(rid)

    def context(self, rids, padding=0, slot=None, walk="decode", capture=False):
        padded = (*rids, *(-2 - i for i in range(padding)))
        lease = None if slot is None else SlotLease(slot, BucketKey(walk, len(padded), len(padded)))
        rows = np.array([self.row_of[rid] for rid in padded], np.int64)
        spans = np.ones(len(padded), np.int64)
        return StepContext(walk, tuple(rids), rows, spans, padded, slot or 0, capture, slot_lease=lease)

    def forward(self, ctx):
        rows = [logits_of(rid, len(self.tokens.get(rid, ()))) for rid in ctx.padded_request_ids]
        return self.sampler.sample(torch.stack(rows)).tolist()

    def run(self, rids, forward, step=PLAIN, **context):
        ctx = self.context(rids, **context)
        self.sampler.plan(step, ctx)
        result = forward(ctx)
        self.sampler.commit(step, ctx)
        return result

    def step(self, rids, kept=None, prompts=None, apply_penalty=True, **context):
        step = SamplerStep(kept_rids=kept, prefill_tracked_tokens=prompts or {}, apply_penalty=apply_penalty)
        drawn = self.run(rids, self.forward, step, **context)
        for rid, token in zip(rids, drawn, strict=False):
            if kept is None or rid in kept:
                self.tokens[rid].append(token)
        return drawn

    def offset_of(self, row):
        """Where the next draw of a request on ``row`` will be made, as the device and the host know it."""
        offset = self.sampler._masters.offset[row].item()
        assert self.sampler.offset_of(row) == offset
        return offset

    def draw(self, rid, times=1, step=PLAIN, **context):
        """Draws of one step in which every token is as likely."""
        flat = torch.zeros(1, VOCAB)
        return self.run([rid], lambda ctx: [self.sampler.sample(flat).item() for _ in range(times)], step, **context)

    def last_tokens(self, rids, **context):
        read = lambda ctx: self.sampler.loopback_tokens().tolist()  # noqa: E731
        return self.run(rids, read, walk="read", **context)

    def state(self, row):
        """Every byte that belongs to a master row."""
        masters = self.sampler._masters
        columns = [master[row] for master in self.sampler._settings._masters.values()]
        columns += [masters.offset[row].numpy(), masters.last_token[row].numpy(), self.sampler._draws[row]]
        history = self.sampler._history
        columns += [history.penalty[row], history.window[row], history.least[row], *map(np.array, self.history(row))]
        return b"".join(column.tobytes() for column in columns)

    def history(self, row):
        """Ids that the row's presence penalty has met, and its ring; empty where it has none."""
        history = self.sampler._history
        seen, ring = (_memory_of(memory, row) for memory in (history.seen, history.ring))
        return np.flatnonzero(seen).tolist(), ring.tolist()


def _memory_of(memory, row):
    memory.settle()
    if not memory.address[row]:
        return np.empty(0, np.int64)
    return memory.of(row).numpy() if isinstance(memory, RowMemory) else memory.host[memory.address[row]]


def alone(rid, config, count, **session):
    session = Session(**session)
    session.join(rid, 0, config)
    for _ in range(count):
        session.step([rid])
    return session.tokens[rid]
