"""A text model whose decoder computes nothing, behind the real submodule, resources, engine and conductor."""

from __future__ import annotations

from typing import Any

import torch

from mstar.conductor.conductor import Conductor
from mstar.conductor.queue import Limits
from mstar.engine.engine import Engine
from mstar.engine.phase_clock import PhaseClock
from mstar.engine.resources.attention.config import AttentionConfig, AttentionSpec
from mstar.engine.resources.grammar.config import Vocabulary
from mstar.engine.resources.kv.config import PagedKVConfig, PagedKVSpec
from mstar.engine.resources.positions.config import PositionConfig, PositionSpec
from mstar.model.engine_model import EngineModel
from mstar.model.registry import NODE, text_walks
from mstar.model.text_llm import DECODE, PREFILL, TextLLM
from mstar.model.text_sampling import sampling_specs

VOCABULARY = 64
CONTEXT = 1024  # tokens
PAGE_SIZE = 16
BATCH_TOKENS = 2048


class StubEmbedding:
    """A token's embedding is its id."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, None]

    def of_last(self, last_token: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return last_token.index_select(0, index)[:, None]


class StubDecoder:
    """Answers every row with the same logits."""

    device = torch.device("cpu")

    def __init__(self, max_rows: int) -> None:
        self.embedding = StubEmbedding()
        self._logits = torch.randn(max_rows, VOCABULARY, generator=torch.Generator().manual_seed(0))

    def __call__(self, x: torch.Tensor, attn: Any, rope: Any) -> torch.Tensor:
        return self._logits[: attn.last_rows(x).shape[0]]


def stub_vocabulary(size: int) -> Vocabulary:
    """Token 0 ends a text; the others up to 255 are single bytes, and token ``i`` from there on the number ``i``."""
    pieces = [b"", *(bytes([i]) for i in range(1, 256)), *(str(i).encode() for i in range(256, size))][:size]
    return Vocabulary(pieces, special_ids=(0,), eos_ids=(0,))


def stub_core(rows: int, waiting: int, run_ahead: bool, clock: PhaseClock) -> Conductor:
    """A conductor over an engine for ``rows`` requests, with ``waiting`` more in its queue; both report their phases to
    ``clock``."""
    nodes = {NODE}
    pages = rows * (CONTEXT // PAGE_SIZE) + 1
    kv = PagedKVConfig(
        num_layers=1,
        num_kv_heads=3,
        num_qo_heads=9,
        head_dim=64,
        max_seq_len=CONTEXT,
        max_num_pages=pages,
        page_size=PAGE_SIZE,
    )
    specs = [
        PagedKVSpec("kv_cache", nodes, kv),
        AttentionSpec("attn", nodes, AttentionConfig()),
        PositionSpec("rope", nodes, PositionConfig()),
        *sampling_specs(nodes, VOCABULARY, (), lambda: stub_vocabulary(VOCABULARY)),
    ]
    submodule = TextLLM(StubDecoder(rows), max_rows=rows, max_tokens=BATCH_TOKENS)  # type: ignore[arg-type]
    model = EngineModel(
        name="stub",
        submodules={NODE: submodule},
        resource_specs=list(specs),
        walks=text_walks(CONTEXT),
        walk_order=(PREFILL, DECODE),
        vocab_size=VOCABULARY,
        max_seq_len=CONTEXT,
        eos_ids=frozenset(),
        dtype=torch.float32,
        kv_dtype=torch.float32,
        num_parameters=0,
        weight_bytes=0,
    )
    engine = Engine(
        model.submodules,
        model.resource_specs,
        device="cpu",
        dtype=torch.float32,
        kv_dtype=torch.float32,
        capacity=rows,
        clock=clock,
    )
    engine.warm_up()
    limits = Limits(
        max_running_requests=rows,
        max_queued_requests=rows + waiting,
        max_batch_tokens=BATCH_TOKENS,
        max_seq_len=CONTEXT,
        vocab_size=VOCABULARY,
        run_ahead=run_ahead,
        mixed_steps=True,
    )
    return Conductor(engine, model, limits)
