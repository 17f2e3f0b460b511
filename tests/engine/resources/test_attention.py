"""Attention and positions through whole steps: what a model sees equals plain attention over each request alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.engine.resources.attention.config import AttentionConfig, AttentionSpec, AttentionStep
from mstar.engine.resources.attention.plan import SHORT_ROW, LabelPlan
from mstar.engine.resources.base import EngineResourceInfo
from mstar.engine.resources.kv.config import KVStep
from mstar.engine.resources.step import Segment, SubmoduleStep
from mstar.kernels import rope, rope_frequencies
from mstar.kernels.attention import attention_reference

from .drive import Rig

NO_SAMPLER = ("kv_cache", "attn", "rope")


@pytest.fixture(params=["SDPA", "TRITON"], scope="module", autouse=True)
def backend(request):
    """Backends that attend on the CPU."""
    Rig.backend = request.param
    yield request.param
    Rig.backend = "SDPA"


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
        frequencies = rope_frequencies.inverse_frequencies(self.q[rid].shape[-1], 1000.0, None)
        outputs = []
        for layer in range(2):
            cos, sin = rope.cos_sin(torch.arange(start + span), frequencies, False)
            q = rope.rotate(self.q[rid][layer, start : start + span], cos[start:], sin[start:], False)
            k = rope.rotate(self.k[rid][layer, : start + span], cos, sin, False)
            outputs.append(attention_reference(q, k, self.v[rid][layer, : start + span], start, window))
        return torch.stack(outputs)


# head_dim 16 has a kernel of its own on the CPU, 12 has none and goes through torch.
DIMS = [16, 12]


@pytest.mark.parametrize("dim", DIMS)
@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), window=st.none() | st.integers(1, 9), group=st.sampled_from([1, 3, 8]), deterministic=st.booleans()
)
def test_any_interleaving_of_prompts_chunks_and_decode_equals_each_request_alone(
    dim, data, window, group, deterministic
):
    rig = Rig(window=window, group=group, deterministic=deterministic, dim=dim)
    rig.reserve(8, 64)
    rids = [1, 2, 3]
    streams = Streams(rig, rids)
    for row, rid in enumerate(rids):
        rig.join(rid, 7 - row)
    for _ in range(data.draw(st.integers(1, 6))):
        chosen = data.draw(st.lists(st.sampled_from(rids), min_size=1, unique=True))
        num_decode = data.draw(st.integers(0, len(chosen)))  # rows of one token come first
        spans = [1 if i < num_decode else data.draw(st.integers(1, 6)) for i in range(len(chosen))]
        padding = data.draw(st.integers(0, 2))
        slot = data.draw(st.sampled_from([None, 0, 1]))
        step = rig.step(*NO_SAMPLER)
        padding_span = int(num_decode == len(chosen))
        out = rig.run(chosen, spans + [padding_span] * padding, streams.forward, step=step, padding=padding, slot=slot)
        assert torch.isfinite(out).all()
        begin = 0
        for rid, span in zip(chosen, spans, strict=True):
            wanted = streams.expected(rid, streams.done[rid], span, window)
            torch.testing.assert_close(out[:, begin : begin + span], wanted, rtol=1e-4, atol=1e-4)
            streams.done[rid] += span
            begin += span


@pytest.mark.parametrize("spans", [[1, 1], [1, 3]])
def test_kernels_are_told_which_of_a_steps_calls_is_the_first(spans, monkeypatch):
    """Later calls may read what the first has seen while the kernel in front of them still runs."""
    monkeypatch.setattr(Rig, "backend", "TRITON")
    rig = Rig(group=2)
    rig.reserve(8, 64)
    streams, told = Streams(rig, [1, 2]), []
    for name in ("_decode", "_mixed"):
        kernels = rig.attn._planner._kernels
        real = getattr(kernels, name)
        recorded = lambda *args, real=real, **options: told.append(options["repeats_rows"]) or real(*args, **options)  # noqa: E731
        monkeypatch.setattr(kernels, name, recorded)
    for row, rid in enumerate([1, 2]):
        rig.join(rid, row)
    for _ in range(2):
        rig.run([1, 2], spans, streams.forward, step=rig.step(*NO_SAMPLER))
    assert told == [False, True] * 2


class Tokens:
    """One request's fixed q, k, v [layers, length, heads, dim] under one label, without positions."""

    def __init__(self, rig, length=40, layers=2, seed=0):
        torch.manual_seed(seed)
        config = rig.kv.config
        self.q = torch.randn(layers, length, config.num_qo_heads, config.head_dim)
        self.k, self.v = torch.randn(2, layers, length, config.num_kv_heads, config.head_dim)

    def expected(self, start, end, window=None):
        rows = zip(self.q, self.k, self.v, strict=True)
        return torch.stack([attention_reference(q[start:end], k[:end], v[:end], start, window) for q, k, v in rows])


def attend(rig, parts, label="main", tail=0):
    """Both layers over ``parts`` of (tokens, start, end), then ``tail`` padding tokens of NaN."""
    outputs = []
    for layer in range(2):
        qkv = []
        for name in "qkv":
            rows = [getattr(tokens, name)[layer, start:end] for tokens, start, end in parts]
            qkv.append(torch.cat([*rows, torch.full((tail, *rows[0].shape[1:]), torch.nan)]))
        outputs.append(rig.attn.attend(*qkv, label=label))
    return torch.stack(outputs)


ONLY_ATTENTION = ("kv_cache", "attn")


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("starts", "spans"), [((6, 0, 9), (1, 5, 3)), ((3, 3, 3), (1, 1, 1)), ((0, 0, 0), (1, 4, 4))])
def test_padding_tokens_of_a_packed_bucket_give_zeros_and_store_nothing_but_in_the_sink(
    starts, spans, deterministic, dim
):
    rig = Rig(dim=dim, deterministic=deterministic)
    rig.reserve(8, 64)
    tokens = [Tokens(rig, seed=i) for i in range(3)]
    step = rig.step(*ONLY_ATTENTION)
    for row, start in enumerate(starts):
        rig.join(row + 1, row)
        if start:
            rig.run([row + 1], [start], lambda rig, ctx, s=start, t=tokens[row]: attend(rig, [(t, 0, s)]), step=step)
    before = rig.kv.cache.clone()
    parts = [(t, s, s + n) for t, s, n in zip(tokens, starts, spans, strict=True)]
    total = sum(spans)
    out = rig.run(
        [1, 2, 3],
        [*spans, 0],
        lambda rig, ctx: attend(rig, parts, tail=16 - total),
        step=step,
        padding=1,
        slot=0,
        bucket_tokens=16,
        is_packed=True,
    )
    assert torch.count_nonzero(out[:, total:]) == 0
    wanted = torch.cat([t.expected(s, e) for t, s, e in parts], 1)
    torch.testing.assert_close(out[:, :total], wanted, rtol=1e-4, atol=1e-5)
    changed = (rig.kv.cache != before)[:, 1:].any(-1).any(-1).sum()
    assert changed == 2 * 2 * total, "layers, keys and values of the real tokens"


@pytest.mark.parametrize("dim", DIMS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), window=st.none() | st.integers(1, 9))
def test_deterministic_bits_depend_neither_on_chunks_nor_on_neighbours_nor_on_padding(dim, data, window):
    rig = Rig(dim=dim, window=window, deterministic=True, pages=200, backend="SDPA")
    rig.reserve(8, 64)
    length, step = 20, rig.step(*ONLY_ATTENTION)
    tokens, neighbour = Tokens(rig, length), Tokens(rig, length, seed=1)
    rig.join(1, 0)
    whole = rig.run([1], [length], lambda rig, ctx: attend(rig, [(tokens, 0, length)]), step=step)
    rig.join(2, 3)
    rig.join(3, 1)
    at, beside, pieces = 0, 0, []
    while at < length:
        span = data.draw(st.integers(1, min(6, length - at)))
        other = data.draw(st.integers(0, min(5, length - beside)))
        is_first = data.draw(st.booleans())
        parts = [(tokens, at, at + span), (neighbour, beside, beside + other)]
        rids, spans, begin = [2, 3], [span, other], 0
        if not is_first:
            parts, rids, spans, begin = parts[::-1], rids[::-1], spans[::-1], other
        tail = data.draw(st.integers(0, 3))
        bucket = {"slot": 0, "bucket_tokens": span + other + tail, "is_packed": True} if tail else {}
        out = rig.run(rids, spans, lambda rig, ctx, p=parts, t=tail: attend(rig, p, tail=t), step=step, **bucket)
        pieces.append(out[:, begin : begin + span])
        at, beside = at + span, beside + other
    assert torch.equal(torch.cat(pieces, 1), whole)


def test_labels_have_streams_and_layer_cursors_of_their_own():
    rig = Rig()
    rig.join(1, 0)
    main, other = Tokens(rig), Tokens(rig, seed=1)
    done = {"main": 0, "other": 0}
    for spans in ({"main": 5, "other": 3}, {"main": 1, "other": 1}, {"main": 2, "other": 4}):
        segments = tuple(Segment(1, label, span) for label, span in spans.items())
        step = SubmoduleStep({"kv_cache": KVStep(), "attn": AttentionStep()}, segments)

        def forward(rig, ctx, spans=spans):
            parts = {"main": main, "other": other}
            return {name: attend(rig, [(t, done[name], done[name] + spans[name])], name) for name, t in parts.items()}

        out = rig.run([1], [1], forward, step=step)
        for label, tokens in (("main", main), ("other", other)):
            wanted = tokens.expected(done[label], done[label] + spans[label])
            torch.testing.assert_close(out[label], wanted, rtol=1e-4, atol=1e-5)
            done[label] += spans[label]


@pytest.mark.parametrize("deterministic", [False, True])
def test_combined_labels_attend_as_one(deterministic):
    rig = Rig(deterministic=deterministic)
    tokens = [Tokens(rig, seed=i) for i in range(4)]
    segments = tuple(Segment(rid, label, 2 + rid) for label in ("a", "b") for rid in (1, 2))
    step = SubmoduleStep({"kv_cache": KVStep(combined_labels={("a", "b"): "both"}), "attn": AttentionStep()}, segments)
    for rid in (1, 2):
        rig.join(rid, rid)
    parts = [(t, 0, s.span) for t, s in zip(tokens, segments, strict=True)]
    out, last = rig.run(
        [1, 2],
        [1, 1],
        lambda rig, ctx: (attend(rig, parts, "both"), rig.attn.last_rows(torch.arange(14)[:, None], "both")),
        step=step,
    )
    torch.testing.assert_close(out, torch.cat([t.expected(0, e) for t, _, e in parts], 1), rtol=1e-4, atol=1e-5)
    assert last.flatten().tolist() == [2, 6, 9, 13]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("queries", [(3, 5), (1, 1), (8, 2)])
def test_cross_attention_reads_a_label_without_growing_it(queries, deterministic, dim):
    rig = Rig(dim=dim, deterministic=deterministic)
    context, texts = [Tokens(rig, seed=i) for i in range(2)], [Tokens(rig, seed=9 + i) for i in range(2)]
    lens = (7, 4)
    for rid in (1, 2):
        rig.join(rid, rid)
    write = tuple(Segment(rid, "context", n) for rid, n in zip((1, 2), lens, strict=True))
    parts = [(t, 0, n) for t, n in zip(context, lens, strict=True)]
    rig.run(
        [1, 2],
        [1, 1],
        lambda rig, ctx: attend(rig, parts, "context"),
        step=SubmoduleStep({"kv_cache": KVStep(), "attn": AttentionStep(causal=False)}, write),
    )
    read = tuple(segment._replace(span=0) for segment in write)
    asked = tuple(segment._replace(span=n) for segment, n in zip(write, queries, strict=True))
    step = SubmoduleStep({"kv_cache": KVStep(), "attn": AttentionStep(asked, causal=False)}, read)

    def forward(rig, ctx):
        nothing = context[0].k[0, :0]
        q = [torch.cat([t.q[layer, :n] for t, n in zip(texts, queries, strict=True)]) for layer in range(2)]
        return [rig.attn.attend(x, nothing, nothing, label="context") for x in q]

    for _ in range(2):
        out = rig.run([1, 2], [1, 1], forward, step=step)
        for layer in range(2):
            rows = zip(texts, context, queries, lens, strict=True)
            wanted = [
                attention_reference(t.q[layer, :n], c.k[layer, :m], c.v[layer, :m], m, causal=False)
                for t, c, n, m in rows
            ]
            torch.testing.assert_close(out[layer], torch.cat(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_an_unchanged_batch_decodes_on_as_each_request_alone(window, backend, monkeypatch):
    followed = []
    follow = LabelPlan.follow
    monkeypatch.setattr(LabelPlan, "follow", lambda *args: followed.append(follow(*args)) or followed[-1])
    rig = Rig(window=window)
    rig.reserve(8, 16)
    for rid in (1, 2):
        rig.join(rid, rid)
    streams, step = Streams(rig, [1, 2]), rig.step(*NO_SAMPLER)
    rig.run([1, 2], [5, 2], streams.forward, step=step)
    contexts = [rig.context([1, 2, -2], [1, 1, 1], slot=slot) for slot in (0, 1)]
    contexts = [replace(ctx, request_ids=(1, 2)) for ctx in contexts]
    for i in range(12):
        streams.done = {1: 5 + i, 2: 2 + i}
        ctx = contexts[i % 2]
        assert rig.runner.admit(step, ctx)[0].ok
        rig.runner.plan(step, ctx)
        out = streams.forward(rig, ctx)
        rig.runner.commit(step, ctx)
        for at, (rid, start) in enumerate(streams.done.items()):
            torch.testing.assert_close(out[:, at], streams.expected(rid, start, 1, window)[:, 0], rtol=1e-4, atol=1e-5)
    assert any(followed) is (backend == "SDPA")


def cross_step(rig, attention):
    """One request with 4 stored tokens, planned to read them with ``attention``'s queries."""
    for rid in (1, 2):
        rig.join(rid, rid)
    rig.run([1, 2], [4, 4], step=rig.step(*ONLY_ATTENTION))
    segments = (Segment(1, "main", 0), Segment(2, "main", 0))
    return SubmoduleStep({"kv_cache": KVStep(), "attn": attention}, segments)


def test_causal_queries_beyond_what_a_row_holds_are_refused():
    rig = Rig()
    step = cross_step(rig, AttentionStep((Segment(1, "main", 5), Segment(2, "main", 1))))
    with pytest.raises(ValueError, match="'main': causal attention with more queries"):
        rig.runner.plan(step, rig.context([1, 2], [1, 1]))


def test_queries_declared_in_another_order_than_the_cache_are_refused():
    rig = Rig()
    step = cross_step(rig, AttentionStep((Segment(2, "main", 1), Segment(1, "main", 2)), causal=False))
    with pytest.raises(ValueError, match="'main': attention and cache must declare the same requests"):
        rig.runner.plan(step, rig.context([1, 2], [1, 1]))


def test_an_unplanned_label_is_an_error():
    rig = Rig()
    rig.join(1, 0)
    rig.runner.plan(rig.step(*ONLY_ATTENTION), rig.context([1], [1]))
    with pytest.raises(KeyError, match="speaker"):
        rig.attn.attend(*(torch.ones(1, h, 16) for h in (6, 2, 2)), label="speaker")


def plan_ahead(rig, spans):
    """Plans the request's next step in the other slot; returns its step and context."""
    step, ctx = rig.step(*ONLY_ATTENTION), rig.context([1], spans, slot=1, is_preplan=True)
    outcome, _ = rig.runner.admit(step, ctx)
    assert outcome.ok
    for key in ONLY_ATTENTION:
        ctx.plan_results[key] = rig.resources[key].plan(step.get(key), ctx)
    return step, rig.context([1], spans, slot=1)


def promote(rig, step, ctx):
    for key in ONLY_ATTENTION:
        ctx.plan_results[key] = rig.resources[key].promote_preplan(step.get(key), ctx)


@pytest.mark.parametrize("meanwhile", ["nothing", "the request moved"])
def test_a_plan_made_ahead_leaves_the_running_step_alone_until_it_is_promoted(meanwhile):
    rig = Rig()
    rig.reserve(8, 16)
    rig.join(1, 0)
    tokens, step = Tokens(rig), rig.step(*ONLY_ATTENTION)
    rig.run([1], [4], lambda rig, ctx: attend(rig, [(tokens, 0, 4)]), step=step)
    ahead, later = plan_ahead(rig, [3])
    if meanwhile == "the request moved":
        out = rig.run([1], [2], lambda rig, ctx: attend(rig, [(tokens, 4, 6)]), step=step, slot=0)
        torch.testing.assert_close(out, tokens.expected(4, 6), rtol=1e-4, atol=1e-5)
    start = int(rig.kv.stored_len[0])
    assert rig.runner.admit(ahead, later)[0].ok
    promote(rig, ahead, later)
    out = attend(rig, [(tokens, start, start + 3)])
    torch.testing.assert_close(out, tokens.expected(start, start + 3), rtol=1e-4, atol=1e-5)
    assert rig.attn.last_rows(torch.arange(3)[:, None]).tolist() == [[2]]


def test_a_cleared_plan_is_gone():
    rig = Rig()
    rig.reserve(8, 16)
    rig.join(1, 0)
    step, later = plan_ahead(rig, [3])
    for key in ONLY_ATTENTION:
        rig.resources[key].clear_preplan()
    with pytest.raises(AssertionError, match="nothing was planned ahead"):
        rig.attn.promote_preplan(step.get("attn"), later)


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


def test_last_rows_of_a_packed_bucket_are_gathered_even_where_it_has_as_many_tokens_as_rows():
    # The capture of such a bucket holds the gather: a prompt of two tokens and an empty row fit it as well.
    rig = Rig()
    rig.reserve(4, 16)
    rig.join(1, 1)
    rig.join(2, 2)
    x = torch.arange(2.0)[:, None]
    addresses = set()
    for rids, spans, last in (([1, 2], [1, 1], [0, 1]), ([1], [2, 0], [1, 1])):
        picked, index = rig.run(
            rids,
            spans,
            lambda rig, ctx: (rig.attn.last_rows(x), rig.attn._last_rows["main"].data_ptr()),
            padding=2 - len(rids),
            slot=0,
            bucket_tokens=2,
            is_packed=True,
        )
        assert picked.flatten().tolist() == last
        addresses.add(index)
    assert len(addresses) == 1


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
    with pytest.raises(ValueError, match=r"must be one of SDPA, FLASHINFER, TRITON, got 'XFORMERS'"):
        AttentionConfig(backend="XFORMERS")


def test_attention_over_something_else_than_a_paged_cache_is_refused():
    rig = Rig()
    cpu = torch.device("cpu")
    info = EngineResourceInfo(cpu, torch.float32, torch.float32, 8, 8, dependencies={"rope": rig.rope})
    spec = AttentionSpec("attn", {"LLM"}, AttentionConfig(kv_cache="rope"))
    with pytest.raises(ValueError, match="'rope' is no paged KV cache"):
        spec.resource_class.build(spec, info)


@pytest.mark.parametrize("prompt", [SHORT_ROW, SHORT_ROW + 1])
def test_short_and_long_prompts_beside_decode_rows_equal_each_alone(prompt):
    rig = Rig(pages=400, max_seq_len=600)
    step, length = rig.step(*ONLY_ATTENTION), SHORT_ROW + 4
    running, long = Tokens(rig, length), Tokens(rig, length, seed=1)
    for rid in (1, 2):
        rig.join(rid, rid)
    rig.run([1], [length - 1], lambda rig, ctx: attend(rig, [(running, 0, length - 1)]), step=step)
    parts = [(running, length - 1, length), (long, 0, prompt)]
    out = rig.run([1, 2], [1, prompt], lambda rig, ctx: attend(rig, parts), step=step)
    wanted = torch.cat([tokens.expected(start, end) for tokens, start, end in parts], 1)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    parts = [(running, 0, 3), (long, prompt, prompt + 3)]
    rig.leave(1)
    rig.join(1, 3)
    out = rig.run([1, 2], [3, 3], lambda rig, ctx: attend(rig, parts), step=step)
    wanted = torch.cat([tokens.expected(start, end) for tokens, start, end in parts], 1)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
