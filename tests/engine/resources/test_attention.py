"""Attention and positions through whole steps: what a model sees equals plain attention over each request alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.attention.config import AttentionConfig, AttentionSpec
from mstar.engine.resources.base import EngineResourceInfo
from mstar.kernels import rope
from mstar.kernels.attention import attention_reference

from .drive import Rig

NO_SAMPLER = ("kv_cache", "attn", "rope")


class Streams:
    """Every request's q, k, v per layer, fixed in advance, so that any batching must give the same outputs."""

    def __init__(self, rig, rids, length=40, layers=2):
        torch.manual_seed(0)
        heads, kv_heads, dim = rig.kv.config.num_qo_heads, rig.kv.config.num_kv_heads, rig.kv.config.head_dim
        self.q = {r: torch.randn(layers, length, heads, dim) for r in rids}
        self.k = {r: torch.randn(layers, length, kv_heads, dim) for r in rids}
        self.v = {r: torch.randn(layers, length, kv_heads, dim) for r in rids}
        self.done = dict.fromkeys(rids, 0)

    def forward(self, rig, ctx):
        at = [(r, self.done.get(r, 0), int(n)) for r, n in zip(ctx.padded_request_ids, ctx.spans, strict=True)]
        outputs = []
        for layer in range(2):
            q, k, v = (
                torch.cat(
                    [x[r][layer, s : s + n] if r in x else torch.full_like(x[1][layer, :n], 1e4) for r, s, n in at]
                )
                for x in (self.q, self.k, self.v)
            )
            outputs.append(rig.attn.attend(*rig.rope.rotate(q, k), v))
        return torch.stack(outputs)

    def tokens(self, x, layer, rid, start, span):
        """A request's tokens, or a padding row's: large numbers, that must not reach anybody."""
        return x[rid][layer, start : start + span] if rid in x else torch.full_like(x[1][layer, :span], 1e4)

    def expected(self, rid, start, span, window=None):
        frequencies = rope.inverse_frequencies(16, 1000.0, None)
        outputs = []
        for layer in range(2):
            cos, sin = rope.cos_sin(torch.arange(start + span), frequencies, False)
            q = rope.rotate(self.q[rid][layer, start : start + span], cos[start:], sin[start:], False)
            k = rope.rotate(self.k[rid][layer, : start + span], cos, sin, False)
            outputs.append(attention_reference(q, k, self.v[rid][layer, : start + span], start, window))
        return torch.stack(outputs)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), window=st.none() | st.integers(1, 9), group=st.sampled_from([1, 3, 8]))
def test_any_interleaving_of_prompts_chunks_and_decode_equals_each_request_alone(data, window, group):
    rig = Rig(window=window, group=group)
    rig.reserve(8, 64)
    rids = [1, 2, 3]
    streams = Streams(rig, rids)
    for row, rid in enumerate(rids):
        rig.join(rid, 7 - row)
    for _ in range(data.draw(st.integers(1, 6))):
        chosen = data.draw(st.lists(st.sampled_from(rids), min_size=1, unique=True))
        is_decode = data.draw(st.booleans())
        spans = [1 if is_decode else data.draw(st.integers(1, 6)) for _ in chosen]
        padding = data.draw(st.integers(0, 2))
        slot = data.draw(st.sampled_from([None, 0, 1]))
        step = rig.step(*NO_SAMPLER)
        out = rig.run(
            chosen, spans + [int(is_decode)] * padding, streams.forward, step=step, padding=padding, slot=slot
        )
        assert torch.isfinite(out).all()
        begin = 0
        for rid, span in zip(chosen, spans, strict=True):
            wanted = streams.expected(rid, streams.done[rid], span, window)
            torch.testing.assert_close(out[:, begin : begin + span], wanted, rtol=1e-4, atol=1e-4)
            streams.done[rid] += span
            begin += span


def test_the_layer_cursor_starts_over_with_every_plan():
    rig = Rig()
    rig.join(1, 0)
    for _ in range(2):
        rig.run([1], [1], lambda rig, ctx: [rig.attn.attend(*(torch.ones(1, h, 16) for h in (6, 2, 2)))] * 2)
        assert torch.count_nonzero(rig.kv.cache[1]) == 0, "only layer 0 was written"


def test_more_calls_than_layers_are_an_error():
    rig = Rig()
    rig.join(1, 0)
    rig.runner.plan(rig.step(), rig.context([1], [1]))
    arguments = [torch.ones(1, h, 16) for h in (6, 2, 2)]
    rig.attn.attend(*arguments)
    rig.attn.attend(*arguments)
    with pytest.raises(IndexError):
        rig.attn.attend(*arguments)


def test_last_rows_of_a_ragged_batch():
    rig = Rig()
    rig.reserve(4, 16)
    for rid in (1, 2):
        rig.join(rid, rid)
    x = torch.arange(8.0)[:, None]
    for slot in (None, 0):
        picked = rig.run([1, 2], [5, 3, 0], lambda rig, ctx: rig.attn.last_rows(x), padding=1, slot=slot)
        assert picked[:2].flatten().tolist() == [4.0, 7.0]
        assert picked.shape == (3, 1)


def test_last_rows_of_a_decode_batch_is_the_batch_itself():
    rig = Rig()
    rig.join(1, 1)
    x = torch.ones(1, 4)
    assert rig.run([1], [1], lambda rig, ctx: rig.attn.last_rows(x)) is x


@pytest.mark.parametrize("window", [0, -1, True, 2.0, "4"])
def test_a_malformed_window_is_refused(window):
    with pytest.raises(ValueError, match="sliding_window"):
        AttentionConfig(sliding_window=window)


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match=r"must be one of SDPA, got 'XFORMERS'"):
        AttentionConfig(backend="XFORMERS")


def test_attention_over_something_else_than_a_paged_cache_is_refused():
    rig = Rig()
    cpu = torch.device("cpu")
    info = EngineResourceInfo(cpu, torch.float32, torch.float32, 8, 8, dependencies={"rope": rig.rope})
    spec = AttentionSpec("attn", {"LLM"}, AttentionConfig(kv_cache="rope"))
    with pytest.raises(ValueError, match="'rope' is no paged KV cache"):
        spec.resource_class.build(spec, info)
