"""Requests that decode through frozen graphs: a replay uses nothing but the tensors that its capture saw.

Every request has a model of its own beside it: which rotated keys and values it holds, and its next position.
"""

import contextlib
import gc

import numpy as np
import torch

from mstar.engine.resources.attention.config import AttentionStep
from mstar.engine.resources.kv.config import KVReqConfig, KVStep
from mstar.engine.resources.positions.config import PositionStep
from mstar.engine.resources.step import SubmoduleStep
from mstar.kernels import rope, rope_frequencies
from mstar.kernels.attention import attention_reference, write_kv

from .drive import Rig

LAYERS, DIM, PAGE_SIZE = 2, 16, 4
SIZES = (1, 3, 5)  # rows of captured decode steps
PACKED_ROWS, PACKED_TOKENS = 4, 12
FREQUENCIES = rope_frequencies.inverse_frequencies(DIM, 1000.0, None)


class Request:
    """What one request holds: rotated keys and values [layers, tokens, kv heads, dim]."""

    def __init__(self):
        self.k = self.v = torch.empty(LAYERS, 0, 2, DIM)
        self.position = 0

    def expected(self, q, k, v, positions, window, keeps):
        """[layers, span, heads, dim] of ``span`` new tokens at ``positions``; they stay with ``keeps``."""
        cos, sin = rope.cos_sin(torch.tensor(positions), FREQUENCIES, False)
        q, k = (torch.stack([rope.rotate(layer, cos, sin, False) for layer in x]) for x in (q, k))
        start = self.k.shape[1]
        keys, values = torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)
        rows = zip(q, keys, values, strict=True)
        out = torch.stack([attention_reference(layer, k, v, start, window) for layer, k, v in rows])
        if keeps:
            self.k, self.v = keys, values
        return out

    def drop_between(self, first, kept_from):
        """Tokens ``first`` to ``kept_from`` are released."""
        self.k, self.v = (torch.cat([x[:, :first], x[:, kept_from:]], 1) for x in (self.k, self.v))


class Frozen:
    """One captured forward: what it saw when it was captured, every replay reads again.

    On the CPU the forward runs anew over the plans of its capture; on a GPU it is a graph.
    """

    def __init__(self, session, ctx, step):
        self._session, rig = session, session.rig
        tokens = ctx.slot_lease.bucket.num_tokens
        self._qkv = [torch.full((LAYERS, tokens, heads, DIM), 1e4, device=session.device) for heads in (6, 2, 2)]
        session.plan(step, ctx)
        session.forward(self._qkv)  # compiles kernels
        session.plan(step, ctx)
        self._attention, self._last = rig.attn._plans["main"], dict(rig.attn._last_rows)
        self._positions = rig.rope._planned["main"]
        self._builds_tables = self._positions.tables is None
        self._graph = torch.cuda.CUDAGraph() if session.device == "cuda" else None
        if self._graph is None:
            session.forward(self._qkv)
        else:
            gc.collect()  # the end of some page-locked memory would break a capture
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._result = session.forward(self._qkv)
        rig.runner.abandon(step, ctx)

    def replay(self, qkv):
        """The forward's result for q, k, v of as many tokens."""
        if self._graph is None:
            with self._as_planned(self._session.rig):
                return self._session.forward(qkv)
        for static, value in zip(self._qkv, qkv, strict=True):
            static.copy_(value)
        self._graph.replay()
        return self._result

    @contextlib.contextmanager
    def _as_planned(self, rig):
        """The managers' plans as they were at capture."""
        planned = rig.attn._plans, rig.attn._last_rows, rig.rope._planned
        self._attention.layer = 0
        for each in (self._attention.kv, self._positions):
            if each.head is not None:
                each.head.has_begun = False
        if self._builds_tables:
            self._positions.tables = None
        rig.attn._plans, rig.attn._last_rows = {"main": self._attention}, self._last
        rig.rope._planned = {"main": self._positions}
        try:
            yield
        finally:
            rig.attn._plans, rig.attn._last_rows, rig.rope._planned = planned


class Session:
    """``stores_itself``: the forward stores keys and values, as a fused one does."""

    def __init__(self, stores_itself=False, window=None, seed=0, device="cpu", **options):
        self.device = device
        options |= {"layers": LAYERS, "dim": DIM, "page_size": PAGE_SIZE}
        self.rig = Rig(window=window, backend="TRITON", device=device, **options)
        self.rig.reserve(8, 64)
        self.window, self.stores_itself = window, stores_itself
        self.random = torch.Generator().manual_seed(seed)
        self.requests = {}
        self.known = {}  # contexts and steps of unchanged batches
        self.graphs = {}
        self.queued = []  # a step planned ahead
        for slot in (0, 1):
            for size in SIZES:
                ctx = self.rig.context([], [1] * size, padding=size, slot=slot, capture=True)
                self.graphs["decode", size, slot] = Frozen(self, ctx, self.step())
            spans = [PACKED_TOKENS - PACKED_ROWS + 1, *[1] * (PACKED_ROWS - 1)]
            ctx = self.packed([], spans, PACKED_ROWS, slot, capture=True)
            self.graphs["packed", PACKED_ROWS, slot] = Frozen(self, ctx, self.step())

    def packed(self, rids, spans, padding, slot, **flags):
        flags |= {"padding": padding, "slot": slot, "bucket_tokens": PACKED_TOKENS, "is_packed": True}
        return self.rig.context(rids, spans, **flags)

    @staticmethod
    def step(commit=True, advance=None, pos_ids=None, retention=None):
        parts = {"kv_cache": KVStep(commit=commit, retention=retention), "attn": AttentionStep()}
        return SubmoduleStep(parts | {"rope": PositionStep(advance=advance, pos_ids=pos_ids)})

    # Requests.

    def join(self, rid, row, prompt=None):
        """Takes a request; returns how many tokens of its prompt are cached."""
        config = KVReqConfig() if prompt is None else KVReqConfig(len(prompt), None, prompt_ids=np.array(prompt))
        self.rig.join(rid, row, kv=config)
        self.requests[rid] = Request()
        self.known.clear()
        matched = self.rig.kv.resolve_cached_prefix(rid) if self.rig.kv.enable_prefix_cache(rid) else 0
        for resource in self.rig.resources.values():
            resource.apply_cached_prefix(rid, row, matched)
        return matched

    def leave(self, rid):
        self.clear_ahead()
        self.rig.leave(rid)
        del self.requests[rid]
        self.known.clear()

    # Steps.

    def plan(self, step, ctx):
        assert self.rig.runner.admit(step, ctx)[0].ok
        self.rig.runner.plan(step, ctx)

    def decode(self, rids, slot, **options):
        """One token of each request through a frozen graph, checked; an unchanged batch comes with the same objects."""
        ahead, ctx, step = self.taken_ahead(rids, slot, options)
        if not ahead:
            ctx, step = self.decode_step(rids, slot, options)
            assert self.rig.runner.admit(step, ctx)[0].ok
        self.run(rids, [1] * len(rids), ctx, step, self.graphs["decode", len(ctx.rows), slot], ahead, options)

    def decode_step(self, rids, slot, options):
        size = next(size for size in SIZES if size >= len(rids))
        make = lambda: (  # noqa: E731
            self.rig.context(rids, [1] * size, padding=size - len(rids), slot=slot),
            self.step(**self.step_options(rids, options, size)),
        )
        if options:
            return make()
        key = tuple(rids), slot
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def step_options(self, rids, options, size):
        options = {
            name: value for name, value in options.items() if name in ("commit", "retention", "advance", "pos_ids")
        }
        padding = size - len(rids)
        if "advance" in options:
            options["advance"] = (options["advance"],) * size
        if "pos_ids" in options:
            options["pos_ids"] = torch.tensor([options["pos_ids"] + i for i in range(len(rids))] + [3] * padding)
        return options

    def plan_ahead(self, rids, slot):
        """Plans the next decode step on a slot that nothing uses."""
        self.clear_ahead()
        ctx, step = self.decode_step(rids, slot, {})
        ahead = self.rig.context(
            rids, ctx.spans.tolist(), padding=len(ctx.rows) - len(rids), slot=slot, is_preplan=True
        )
        ahead.slot_lease, ahead.label_cache, ahead.rows = ctx.slot_lease, ctx.label_cache, ctx.rows
        if not self.rig.runner.pre_admit(step, ahead)[0].ok:
            self.rig.runner.clear()
            return
        self.rig.runner.pre_plan(step, ahead)
        self.queued = [(list(rids), slot, ctx, step)]

    def taken_ahead(self, rids, slot, options):
        if self.queued and self.queued[0][:2] == (list(rids), slot) and not options:
            _, _, ctx, step = self.queued.pop()
            assert self.rig.runner.admit(step, ctx, promoted=True)[0].ok
            return True, ctx, step
        self.clear_ahead()
        return False, None, None

    def clear_ahead(self):
        if self.queued:
            self.queued.clear()
            self.rig.runner.clear()

    def eager(self, rids, spans, **options):
        """Tokens of each request by a forward that plans everything."""
        self.clear_ahead()
        ctx, step = self.rig.context(rids, spans), self.step(**self.step_options(rids, options, len(rids)))
        assert self.rig.runner.admit(step, ctx)[0].ok
        self.run(rids, spans, ctx, step, None, False, options)

    def through_packed(self, rids, spans, slot):
        """Rows of any length through the frozen packed graph."""
        self.clear_ahead()
        padding = PACKED_ROWS - len(rids)
        ctx, step = self.packed(rids, [*spans, *[0] * padding], padding, slot), self.step()
        assert self.rig.runner.admit(step, ctx)[0].ok
        self.run(rids, spans, ctx, step, self.graphs["packed", PACKED_ROWS, slot], False, {})

    def run(self, rids, spans, ctx, step, graph, ahead, options):
        rig, total = self.rig, sum(spans)
        rig.runner.plan(step, ctx, promoted=ahead)
        tokens = ctx.slot_lease.bucket.num_tokens if ctx.slot_lease else total
        qkv = [torch.randn(LAYERS, tokens, heads, DIM, generator=self.random) for heads in (6, 2, 2)]
        for x in qkv:
            x[:, total:] = 1e4
        on_device = [x.to(self.device) for x in qkv]
        out, last = (x.cpu() for x in (graph.replay(on_device) if graph else self.forward(on_device)))
        failed = options.get("fails", False)
        keeps = options.get("commit", True) and not failed
        begin = 0
        for i, (rid, span) in enumerate(zip(rids, spans, strict=True)):
            request, at = self.requests[rid], slice(begin, begin + span)
            first = options["pos_ids"] + i if "pos_ids" in options else request.position
            positions = range(first, first + span)
            wanted = request.expected(*(x[:, at] for x in qkv), list(positions), self.window, keeps)
            torch.testing.assert_close(out[:, at], wanted, rtol=1e-4, atol=1e-4)
            begin += span
            assert last[i] == max(begin - 1, 0)
            if not failed:
                request.position += options.get("advance", span)
        if failed:
            rig.runner.abandon(step, ctx)
        else:
            rig.runner.commit(step, ctx)
            self.retain(rids, options.get("retention"))
        padding = ctx.padded_request_ids[ctx.num_real :]
        for resource in rig.resources.values():
            resource.reset_rows(padding, ctx.rows[ctx.num_real :])
        rig.kv.check_pages()
        self.check()

    def retain(self, rids, retention):
        for request in (self.requests[rid] for rid in rids if retention is not None):
            first = -(-retention.protected_tokens // PAGE_SIZE)
            kept_from = (request.k.shape[1] - retention.keep_tokens) // PAGE_SIZE
            if kept_from > first:
                request.drop_between(first * PAGE_SIZE, kept_from * PAGE_SIZE)

    def check(self):
        """The host's numbers are the models'."""
        for rid, request in self.requests.items():
            row = self.rig.row_of[rid]
            assert self.rig.kv.stored_len[row] == request.k.shape[1]
            assert self.rig.rope.next_position[row] == request.position

    def forward(self, qkv):
        """Attention of all layers over q and k, which are rotated here, and v: each [layers, tokens, heads, dim]; and
        the token that is each row's last."""
        rig, out = self.rig, []
        for q, k, v in zip(*qkv, strict=True):
            if not self.stores_itself:
                out.append(rig.attn.attend(*rig.rope.rotate(q, k), v))
                continue
            layer, key_index = rig.attn.next_layer()
            q, k = rig.rope.rotate(q, k)
            write_kv(layer, key_index, key_index + PAGE_SIZE, k, v)
            out.append(rig.attn.attend_stored(q))
        last = rig.attn.last_rows(torch.arange(qkv[0].shape[1], device=self.device)[:, None])
        return torch.stack(out), last[:, 0]
