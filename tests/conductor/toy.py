"""A model whose output is its prompt: the real engine and KV cache under a network of a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from mstar.conductor.conductor import Conductor
from mstar.conductor.queue import Limits
from mstar.conductor.report import Failure
from mstar.conductor.request import EngineRequest
from mstar.engine.engine import Engine
from mstar.engine.inputs import ARNodeInputs
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.resources.base import Resource
from mstar.engine.resources.kv.config import KVStep, PagedKVConfig, PagedKVSpec
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ADMITTED, AdmitOutcome, ResourceStep, Segment, SubmoduleStep
from mstar.engine.submodule import ARNodeSubmodule
from mstar.graph import Edge, Loop, Node, Walk

VOCAB, EOS, OTHER_EOS, FAULT, RAISES, BAD_INPUT = 100, 0, 2, 90, 91, 92
NODE = "LLM"


class Mood(Resource):
    """Answers admissions as ``moods`` say, then lets everything pass."""

    def __init__(self) -> None:
        self.moods: Iterator[AdmitOutcome] = iter(())

    @classmethod
    def build(cls, spec, info):
        return cls()

    def admit(self, step, ctx):
        return next(self.moods, ADMITTED)


class MoodSpec(NodeResourceSpec):
    @property
    def resource_class(self):
        return Mood


class Echo(ARNodeSubmodule):
    """Generates the prompt again and again, from its first token on.

    A prompt token ``FAULT`` spoils that row's logits, ``RAISES`` breaks every step that would draw it, ``BAD_INPUT``
    first breaks the row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}
        self.steps: list[tuple[str, tuple[int, ...]]] = []
        self.spans: list[tuple[int, ...]] = []
        self.prompts: dict[int, np.ndarray] = {}
        self.largest_batch: int | None = None

    def prepare_inputs(self, graph_walk, info):
        if info.prompt_ids[0] == BAD_INPUT:
            raise ValueError("no such input")
        self.prompts[info.request_id] = info.prompt_ids
        length = len(info.prompt_ids) if graph_walk == "prefill" else 1
        return ARNodeInputs(input_ids=info.prompt_ids[:length], input_seq_len=length, walk=graph_walk)

    def split_inputs(self, inputs, num_tokens):
        first, rest = inputs.input_ids[:num_tokens], inputs.input_ids[num_tokens:]
        return tuple(ARNodeInputs(input_ids=ids, input_seq_len=len(ids), walk=inputs.walk) for ids in (first, rest))

    def max_batch_size(self, graph_walk):
        return self.largest_batch

    def declare_step(self, graph_walk, request_ids, inputs, slot_lease=None, piecewise_leases=None):
        segments = tuple(Segment(rid, "main", row.input_seq_len) for rid, row in zip(request_ids, inputs, strict=True))
        return SubmoduleStep({"kv_cache": KVStep(), "mood": ResourceStep()}, segments)

    def get_combined_graph_walks(self):
        return {NODE: {"mixed": ("decode", "prefill")}}

    def preprocess(self, graph_walk, engine_inputs, inputs):
        return {"ids": torch.tensor(engine_inputs.request_ids)}

    def forward_batched(self, graph_walk, engine_inputs, *, ids):
        counts = [self.counts.get(rid, 0) for rid in ids.tolist()]
        prompts = [self.prompts[rid] for rid in ids.tolist()]
        tokens = [int(prompt[count % len(prompt)]) for prompt, count in zip(prompts, counts, strict=True)]
        if RAISES in tokens:
            raise RuntimeError("the forward broke")
        self.steps.append((graph_walk, tuple(ids.tolist())))
        self.spans.append(tuple(engine_inputs.ctx.spans.tolist()))
        self.counts.update(zip(ids.tolist(), [count + 1 for count in counts], strict=True))
        new_token = torch.tensor(tokens)
        return BatchedModelOutput(check_stop_buffers={"new_token": new_token, "fault": new_token == FAULT})

    def cleanup_request(self, request_id):
        self.counts.pop(request_id, None)
        self.prompts.pop(request_id, None)


@dataclass
class EchoModel:
    walks: list[Walk]
    resource_specs: list[NodeResourceSpec]
    eos_ids: frozenset[int] = frozenset({EOS, OTHER_EOS})

    def next_walk(self, finished: str | None) -> str | None:
        return {None: "prefill", "prefill": "decode", "decode": None}[finished]


@dataclass
class Outcome:
    """What a request brought in all."""

    tokens: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def num_ends(self) -> int:
        return len(self.finishes) + len(self.failures)


class Bench:
    """A conductor over the echo model, and what every request brought so far."""

    def __init__(
        self,
        *,
        pages=64,
        page_size=16,
        context=64,
        rows=8,
        queued=100,
        queued_tokens=0,
        batch_tokens=256,
        largest_batch=None,
        run_ahead=False,
        mixed=False,
        **kv_fields,
    ):
        kv = PagedKVConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            max_seq_len=context,
            max_num_pages=pages + 1,
            page_size=page_size,
            **kv_fields,
        )
        self.echo = Echo()
        self.echo.largest_batch = largest_batch
        specs = [PagedKVSpec("kv_cache", {NODE}, kv), MoodSpec("mood", {NODE})]
        self.engine = Engine(
            {NODE: self.echo}, specs, device="cpu", dtype=torch.float32, kv_dtype=torch.float32, capacity=rows
        )
        loop = Loop(Node(NODE, ("token",), (Edge(NODE, "token"),)), max_iters=context, stop_signal="decode_loop")
        walks = [Walk("prefill", Node(NODE, ("token",))), Walk("decode", loop)]
        limits = Limits(
            max_running_requests=rows,
            max_queued_requests=queued,
            max_queued_tokens=queued_tokens,
            max_batch_tokens=batch_tokens,
            max_seq_len=context,
            vocab_size=VOCAB,
            run_ahead=run_ahead,
            mixed_steps=mixed,
        )
        self.conductor = Conductor(self.engine, EchoModel(walks, specs), limits)
        self.kv = self.engine.resources["kv_cache"]
        self.mood = self.engine.resources["mood"]
        self.outcomes: dict[int, Outcome] = {}

    def submit(self, prompt, max_tokens=4, **fields) -> int:
        ids = np.asarray(prompt, "<i4").tobytes()
        request = EngineRequest(prompt_ids=ids, max_tokens=max_tokens, temperature=0.0, **fields)
        request_id = self.conductor.submit(request)
        self.outcomes[request_id] = Outcome()
        return request_id

    def step(self):
        report = self.conductor.step()
        rows = zip(report.request_ids.tolist(), report.tokens.tolist(), report.finish.tolist(), strict=True)
        for request_id, token, finish in rows:
            outcome = self.outcomes[request_id]
            assert outcome.num_ends == 0, "a request was reported after its end"
            if token >= 0:
                outcome.tokens.append(token)
            if finish:
                outcome.finishes.append(finish)
        for failure in report.failures:
            self.outcomes[failure.request_id].failures.append(failure)
        return report

    def run(self, most_steps=2000) -> None:
        for _ in range(most_steps):
            if self.conductor.has_work():
                self.step()
        assert not self.conductor.has_work(), f"still at work after {most_steps} steps"

    def assert_idle(self) -> None:
        """Everything a request can hold is back."""
        self.kv.check_pages()
        assert self.kv.free_pages == self.kv.num_usable_pages
        assert self.kv.promised_pages == 0
        assert self.conductor.num_running == self.conductor.num_queued == self.conductor.num_queued_tokens == 0
        assert not self.echo.counts
