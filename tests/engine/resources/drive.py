"""Drives resources through steps as the engine does: rows by request, admit, plan, forward, commit."""

import numpy as np
import torch

from mstar.engine.resources.attention.config import AttentionConfig, AttentionSpec, AttentionStep
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.kv.config import KVReqConfig, KVStep, PagedKVConfig, PagedKVSpec
from mstar.engine.resources.positions.config import PositionConfig, PositionSpec, PositionStep
from mstar.engine.resources.runner import StepRunner, build_resources
from mstar.engine.resources.sampler.config import SamplerSpec, SamplerStep
from mstar.engine.resources.step import BucketKey, SlotLease, StepContext, SubmoduleStep

VOCAB = 97
CAPACITY = 8


class Rig:
    """All four resources, built small.  Requests are master rows ``0 .. 7``, padding rows ``8 .. 15``."""

    backend = "SDPA"  # of attention, where a rig is not given another

    def __init__(
        self,
        *,
        pages=64,
        page_size=4,
        max_seq_len=200,
        layers=2,
        kv_heads=2,
        group=3,
        dim=16,
        window=None,
        deterministic=False,
        backend=None,
        device="cpu",
        positions=None,
        **kv_options,
    ):
        kv = PagedKVConfig(
            num_layers=layers,
            num_kv_heads=kv_heads,
            num_qo_heads=kv_heads * group,
            head_dim=dim,
            max_seq_len=max_seq_len,
            max_num_pages=pages,
            page_size=page_size,
            **kv_options,
        )
        nodes = {"LLM"}
        self.specs = [
            SamplerSpec("sampler", nodes, VOCAB, enable_min_p=True, enable_top_p_first=True),
            PagedKVSpec("kv_cache", nodes, kv),
            AttentionSpec("attn", nodes, AttentionConfig("kv_cache", backend or self.backend, window, deterministic)),
            PositionSpec("rope", nodes, positions or PositionConfig(rope_theta=1000.0)),
        ]
        info = EngineResourceInfo(
            device=torch.device(device),
            dtype=torch.float32,
            kv_dtype=torch.float32,
            capacity=CAPACITY,
            padding_rows=8,
            num_slots=2,
        )
        self.resources = build_resources(self.specs, info)
        self.runner = StepRunner(self.resources, self.specs)
        self.kv, self.attn = self.resources["kv_cache"], self.resources["attn"]
        self.rope, self.sampler = self.resources["rope"], self.resources["sampler"]
        self.row_of = {-2 - i: CAPACITY + i for i in range(8)}

    def reserve(self, max_bs, tokens):
        for resource in self.resources.values():
            resource.build_accelerator_graph_buffers([], max_bs, tokens)

    def join(self, rid, row, sampling=None, kv=None):
        self.row_of[rid] = row
        for key, resource in self.resources.items():
            resource.ingest_request(rid, row, {"sampler": sampling, "kv_cache": kv or KVReqConfig()}.get(key))

    def leave(self, rid):
        row = self.row_of.pop(rid)
        for resource in self.resources.values():
            resource.remove_request(rid, row)

    def context(self, rids, spans, padding=0, slot=None, *, bucket_tokens=None, first_padding=0, **flags):
        """``spans`` of real and padding rows; a slot makes it a leased step, of a bucket of ``bucket_tokens`` tokens
        that the forward sees whole when given.  ``flags`` are fields of :class:`StepContext`."""
        padded = (*rids, *(-2 - first_padding - i for i in range(padding)))
        tokens = sum(spans) if bucket_tokens is None else bucket_tokens
        lease = None if slot is None else SlotLease(slot, BucketKey("decode", len(padded), tokens))
        return StepContext(
            "decode",
            tuple(rids),
            np.array([self.row_of[r] for r in padded], np.int64),
            np.array(spans, np.int64),
            padded_request_ids=padded,
            slot=slot or 0,
            slot_lease=lease,
            pads_tokens=bucket_tokens is not None,
            **flags,
        )

    def step(self, *keys, kept_rids=None, apply_filters=True):
        parts = {
            "kv_cache": KVStep(),
            "attn": AttentionStep(),
            "rope": PositionStep(),
            "sampler": SamplerStep(kept_rids=kept_rids, apply_filters=apply_filters),
        }
        return SubmoduleStep({key: parts[key] for key in keys or parts})

    def run(self, rids, spans, forward=lambda rig, ctx: None, step=None, **context):
        """One step; returns what ``forward(rig, ctx)`` returned."""
        step, ctx = step or self.step(), self.context(rids, spans, **context)
        outcome, key = self.runner.admit(step, ctx)
        assert outcome.ok, (outcome, key)
        self.runner.plan(step, ctx)
        result = forward(self, ctx)
        self.runner.commit(step, ctx)
        padding = ctx.padded_request_ids[ctx.num_real :]
        for resource in self.resources.values():
            resource.reset_rows(padding, ctx.rows[ctx.num_real :], free=True)
        self.kv.check_pages()
        return result
