"""Everything a stream can go through, in random order: it always holds its own tokens, and pages are conserved.

Keys hold token ids, so that a page shared, copied, evicted, moved or rewritten wrongly shows as wrong content.
"""

import os
from unittest import mock

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.engine.resources.kv.config import Fork, KVReqConfig, KVStep, Retention
from mstar.engine.resources.step import AllocationFailed, Segment

from .drive import CAPACITY, Rig

LABELS = ("main", "side")
PAGE = 4
LONGEST = 60
KNOBS = {"MSTAR_KV_DEBUG_ASSERTS": "1", "MSTAR_KV_PLAN_CACHE": "2", "MSTAR_KV_PINNED_INDPTRS": "1"}


class Request:
    def __init__(self, prompt, matched):
        self.prompt = prompt
        self.stream = {"main": prompt[:matched], "side": []}
        self.has_history = True  # "main" is still its prompt and what followed


class Streams(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        with mock.patch.dict(os.environ, KNOBS | {"MSTAR_KV_CHAIN_LAZY_STEPS": "3"}):
            self.rig = Rig(pages=28, max_seq_len=LONGEST, layers=1, kv_heads=1, dim=2, cpu_offload_pages=12)
        self.rig.reserve(16, 128)
        self.kv = self.rig.kv
        self.live = {}
        self.next_id = 0

    @precondition(lambda self: len(self.live) < CAPACITY)
    @rule(length=st.sampled_from([3, 9, 13, 13]), first=st.sampled_from([1, 1, 1, 2]))
    def join(self, length, first):
        prompt = [first] * length
        rid, row = self.next_id, min(set(range(CAPACITY)) - {self.rig.row_of[r] for r in self.live})
        self.next_id += 1
        self.rig.row_of[rid] = row
        config = KVReqConfig(len(prompt), 5, prompt_ids=np.array(prompt))
        self.kv.ingest_request(rid, row, config)
        matched = self.kv.resolve_cached_prefix(rid)
        self.kv.apply_cached_prefix(rid, row, matched)
        assert matched < len(prompt)
        self.live[rid] = Request(prompt, matched)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data):
        rid = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[rid]
        self.kv.remove_request(rid, self.rig.row_of.pop(rid))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def move(self, data):
        rid = data.draw(st.sampled_from(sorted(self.live)))
        held = bool(self.held(rid))
        if self.kv.is_offloaded(rid):
            assert self.kv.can_reload(rid) == self.kv.reload(rid)
        elif self.kv.offload(rid):
            assert held

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        kind=st.sampled_from(["step", "step", "step", "uncommitted", "abandoned", "promoted", "cleared"]),
        forks=st.sampled_from(
            [{}, {}, {}, {"pre": ("main", "side")}, {"post": ("main", "side")}, {"pre": ("side", "main")}]
        ),
        is_decode=st.booleans(),
        retention=st.none() | st.builds(Retention, st.integers(0, 5), st.integers(0, 5)),
        slot=st.none() | st.integers(0, 1),
    )
    def step(self, data, kind, forks, is_decode, retention, slot):
        ready = [rid for rid in sorted(self.live) if not self.kv.is_offloaded(rid)]
        if not ready:
            return
        rids = data.draw(st.lists(st.sampled_from(ready), min_size=1, max_size=3, unique=True))
        spans = {
            (rid, "main"): 1 if is_decode else self.prompt_left(rid, data.draw(st.sampled_from([0, 2, 9, 13])))
            for rid in rids
        }
        if not is_decode:
            spans |= {(rid, "side"): data.draw(st.integers(0, 4)) for rid in rids[:1]}
        between = {when: (Fork(rids[0], *labels),) for when, labels in forks.items()}
        step = KVStep(
            tuple(Segment(*key, span) for key, span in spans.items()),
            commit=kind != "uncommitted",
            pre_forks=between.get("pre", ()),
            post_forks=between.get("post", ()),
            retention=retention if kind == "step" and not forks else None,
        )
        ctx = self.rig.context(rids, [1] * len(rids), slot=slot, is_preplan=kind in ("promoted", "cleared"))
        outcome = self.kv.admit(step, ctx)
        if not outcome.ok:
            assert not isinstance(outcome.reason, AllocationFailed) or outcome.reason.pages_short > 0
            self.kv.clear_preplan()
            return
        ctx.plan_results["kv_cache"] = self.kv.plan(step, ctx)
        if kind == "abandoned":
            self.kv.abandon(step, ctx)
            return
        if kind == "cleared":
            self.kv.clear_preplan()
            return
        if kind == "promoted":
            ctx = self.rig.context(rids, [1] * len(rids), slot=slot)
            ctx.plan_results["kv_cache"] = self.kv.promote_preplan(step, ctx)
        self.write(spans, step, ctx, retention)

    @precondition(lambda self: self.live)
    @rule(slot=st.integers(0, 1), steps=st.integers(2, 5))
    def decode(self, slot, steps):
        rids = [rid for rid in sorted(self.live) if not self.kv.is_offloaded(rid)]
        rids = [rid for rid in rids if len(self.live[rid].stream["main"]) >= len(self.live[rid].prompt)]
        for _ in range(steps if rids else 0):
            step = KVStep()
            ctx = self.rig.context(rids, [1] * len(rids), slot=slot)
            if not self.kv.admit(step, ctx).ok:
                return
            ctx.plan_results["kv_cache"] = self.kv.plan(step, ctx)
            self.write({(rid, "main"): 1 for rid in rids}, step, ctx, None)

    def prompt_left(self, rid, span):
        """A prompt is never run into the tokens that follow it."""
        left = len(self.live[rid].prompt) - len(self.live[rid].stream["main"])
        return min(span, left) if left > 0 else min(span, 1)

    def write(self, spans, step, ctx, retention):
        for fork in step.pre_forks:
            self.copy(fork)
        tokens = {}
        for (rid, label), span in spans.items():
            request = self.live[rid]
            at = len(request.stream[label])
            follows = request.prompt[at : at + span] if label == "main" and request.has_history else []
            tokens[rid, label] = follows + [3 + (rid + at + i) % 5 for i in range(len(follows), span)]
        flat = self.kv.cache[0].view(-1, 2)
        for label, plan in ctx.plan_results["kv_cache"].items():
            written = [token for (_, of), group in tokens.items() if of == label for token in group]
            flat[plan.key_index] = torch.tensor(written, dtype=torch.float32)[:, None].expand(-1, 2)
        generated = [
            (rid, group[0])
            for (rid, label), group in tokens.items()
            if label == "main" and group and len(self.live[rid].stream["main"]) >= len(self.live[rid].prompt)
        ]
        if generated:  # sampled in the step before
            rows = np.array([self.rig.row_of[rid] for rid, _ in generated])
            self.kv.extend_prefix_chains(rows, np.array([token for _, token in generated]))
        self.kv.commit(step, ctx)
        if step.commit:
            for (rid, label), group in tokens.items():
                stream = self.live[rid].stream[label] = self.live[rid].stream[label] + group
                if step.retention is not None and group:
                    first = -(-retention.protected_tokens // PAGE)
                    last = (len(stream) - retention.keep_tokens) // PAGE
                    if last > first:
                        del stream[first * PAGE : last * PAGE]
                        self.live[rid].has_history &= label != "main"
        for fork in step.post_forks:
            self.copy(fork)

    def copy(self, fork):
        request = self.live[fork.request_id]
        request.stream[fork.target] = list(request.stream[fork.source])
        request.has_history &= fork.target != "main"

    def streams_of(self, rid):
        row = np.array([self.rig.row_of[rid]])
        return {label: int(self.kv._streams.of(label, row)[0]) for label in LABELS}

    def held(self, rid):
        return sum(int(self.kv.num_pages[stream]) for stream in self.streams_of(rid).values())

    @invariant()
    def every_stream_holds_its_own_tokens(self):
        for rid, request in self.live.items():
            for label, stream in self.streams_of(rid).items():
                if not self.kv.is_offloaded(rid):
                    pages = torch.from_numpy(self.kv.page_table[stream].astype(np.int64))
                    stored = self.kv.cache[0, pages, 0].reshape(-1, 2)[: self.kv.stored_len[stream], 0]
                    assert stored.int().tolist() == request.stream[label]

    @invariant()
    def pages_are_conserved(self):
        self.kv.check_pages()
        self.kv._offloading.pool.check()
        assert self.kv.plan_cache_stats["mismatch"] == 0
        if not self.live:
            assert self.kv.free_pages == self.kv.num_usable_pages


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
