"""A model whose output is its prompt: the real engine and KV cache under a network of a few lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from mstar.conductor.conductor import Conductor
from mstar.conductor.queue import Limits
from mstar.conductor.report import Failure
from mstar.conductor.request import NO_TOKEN, EngineRequest
from mstar.engine.engine import Engine
from mstar.engine.inputs import ARNodeInputs
from mstar.engine.outputs import BatchedModelOutput
from mstar.engine.resources.base import Resource, RowVerdict
from mstar.engine.resources.grammar.config import GrammarSpec
from mstar.engine.resources.kv.config import KVStep, PagedKVConfig, PagedKVSpec
from mstar.engine.resources.logprobs.config import LogprobsSpec
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ADMITTED, AdmitOutcome, ResourceStep, Segment, SubmoduleStep
from mstar.engine.submodule import ARNodeSubmodule
from mstar.graph import Edge, Loop, Node, Walk
from mstar.model.text_rows import split_row

VOCAB, EOS, OTHER_EOS, FAULT, RAISES, BAD_INPUT, NO_CHOICE = 100, 0, 2, 90, 91, 92, 93
COMPLETES, BREAKS = 40, 41  # what a grammar of the toy takes these tokens for
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


class Panic(BaseException):
    """What a library written in Rust raises."""


class Grammars(Resource):
    """Takes every token but ``BREAKS``, and is complete after ``COMPLETES``.

    ``reason``: why a row broke, if that lies in its request.

    Its steps need all tokens before: ``steps_ahead`` counts rows that were admitted without.  A text "malformed" is
    refused, "crashes" raises, "slow" is prepared once ``may_prepare`` is set.
    """

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.accepted: dict[int, list[int]] = {}
        self.may_prepare = threading.Event()
        self.steps_ahead = 0
        self.reason = ""
        self._stepped: dict[int, int] = {}
        self._row_of: dict[int, int] = {}

    @classmethod
    def build(cls, spec, info):
        return cls()

    def prepare_request(self, config):
        if config.text == "slow":
            assert self.may_prepare.wait(20)
        if config.text == "malformed":
            raise ValueError("guided_decoding_guide: malformed")
        if config.text == "crashes":
            raise Panic("out of memory")
        self.prepared.append(config.text)

    def ingest_request(self, request_id, row, config):
        if config is not None:
            assert config.text in self.prepared
            self._row_of[row] = request_id
            self._stepped[row] = 0
            self.accepted[request_id] = []

    def remove_request(self, request_id, row):
        self._row_of.pop(row, None)

    def admit(self, step, ctx):
        for row in ctx.rows.tolist():
            if row in self._row_of:
                self.steps_ahead += self._stepped[row] != len(self.accepted[self._row_of[row]])
        return ADMITTED

    def commit(self, step, ctx):
        for row in ctx.rows.tolist():
            if row in self._row_of:
                self._stepped[row] += 1

    def accept_tokens(self, rows, tokens):
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self.accepted[self._row_of[row]].append(token)
        verdicts = np.zeros(rows.size, np.uint8)
        verdicts[tokens == COMPLETES] = RowVerdict.COMPLETE
        verdicts[tokens == BREAKS] = RowVerdict.BROKEN
        return verdicts if verdicts.any() else None

    def reason_of(self, row):
        assert row in self._row_of
        return self.reason


class ToyGrammarSpec(GrammarSpec):
    @property
    def resource_class(self):
        return Grammars


class Observer(Resource):
    """Stands for log-probabilities, which the forward makes up."""

    @classmethod
    def build(cls, spec, info):
        return cls()


class ToyLogprobsSpec(LogprobsSpec):
    @property
    def resource_class(self):
        return Observer


class Echo(ARNodeSubmodule):
    """Generates the prompt again and again, from its first token on.

    A prompt token ``FAULT`` spoils that row's logits, ``NO_CHOICE`` leaves it nothing to draw, ``RAISES`` breaks every
    step that would draw it, ``BAD_INPUT`` first breaks the row.  Of a token t it tells log-probability -t and rank t,
    and of the most likely tokens 1, 2, ... as many as the vocabulary of five ids has.
    """

    supports_chunked_prefill = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}
        self.steps: list[tuple[str, tuple[int, ...]]] = []
        self.spans: list[tuple[int, ...]] = []
        self.prompts: dict[int, np.ndarray] = {}
        self.told: dict[int, int] = {}  # tokens of each prompt that something was told of
        self.rows: list[ARNodeInputs] = []
        self.largest_batch: int | None = None

    def prepare_inputs(self, graph_walk, info):
        if info.prompt_ids[0] == BAD_INPUT:
            raise ValueError("no such input")
        self.prompts.setdefault(info.request_id, info.prompt_ids)
        length = len(info.prompt_ids) if graph_walk == "prefill" else 1
        ids = torch.from_numpy(info.prompt_ids[:length])
        return ARNodeInputs(input_ids=ids, input_seq_len=length, walk=graph_walk)

    def split_inputs(self, inputs, num_tokens):
        assert 0 < num_tokens < inputs.input_seq_len
        return split_row(inputs, num_tokens)

    def max_batch_size(self, graph_walk):
        return self.largest_batch

    def declare_step(self, graph_walk, request_ids, inputs, slot_lease=None, piecewise_leases=None):
        segments = tuple(Segment(rid, "main", row.input_seq_len) for rid, row in zip(request_ids, inputs, strict=True))
        steps = {"kv_cache": KVStep(), "mood": ResourceStep(), "grammar": ResourceStep(), "logprobs": ResourceStep()}
        return SubmoduleStep(steps, segments)

    def get_combined_graph_walks(self):
        return {NODE: {"mixed": ("decode", "prefill")}}

    def preprocess(self, graph_walk, engine_inputs, inputs):
        self.rows = list(inputs)
        return {"ids": torch.tensor(engine_inputs.request_ids)}

    def forward_batched(self, graph_walk, engine_inputs, *, ids):
        counts = [self.counts.get(rid, 0) for rid in ids.tolist()]
        prompts = [self.prompts[rid] for rid in ids.tolist()]
        tokens = [int(prompt[count % len(prompt)]) for prompt, count in zip(prompts, counts, strict=True)]
        if RAISES in tokens:
            raise RuntimeError("the forward broke")
        self.steps.append((graph_walk, tuple(ids.tolist())))
        self.spans.append(tuple(engine_inputs.ctx.spans.tolist()))
        kept = [row.is_final_chunk for row in self.rows]
        self.counts.update(zip(ids.tolist(), map(sum, zip(counts, kept, strict=True)), strict=True))
        new_token = torch.tensor(tokens)
        fault = (new_token == FAULT).to(torch.int8) + 2 * (new_token == NO_CHOICE).to(torch.int8)
        told = {"logprob": -new_token.float(), "logprob_rank": new_token.int()} | most_likely(len(tokens))
        return BatchedModelOutput(
            per_rid_outputs={rid: self.tell(rid, row) for rid, row in zip(ids.tolist(), self.rows, strict=True)},
            check_stop_buffers={"new_token": new_token, "fault": fault} | told,
        )

    def tell(self, request_id, row):
        """Of the prompt's tokens that this step's predict; a part's last one predicts the next part's first."""
        if row.walk == "prefill" and row.chunk_start == 0:
            self.told.pop(request_id, None)
        prompt, begin = self.prompts[request_id], self.told.get(request_id, 0)
        end = len(prompt) if row.is_final_chunk else row.chunk_start + row.input_seq_len
        self.told[request_id] = end
        return of_prompt(prompt[begin : end + 1])

    def cleanup_request(self, request_id):
        self.told.pop(request_id, None)
        self.counts.pop(request_id, None)
        self.prompts.pop(request_id, None)


def most_likely(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.full((rows, 20), -1, dtype=torch.int32)
    ids[:, :5] = torch.arange(1, 6)
    return {"top_ids": ids, "top_logprobs": torch.where(ids < 0, -torch.inf, -ids.float())}


def of_prompt(prompt: np.ndarray) -> dict[str, list[torch.Tensor]]:
    """What is told of a prompt from its second token on, in two pieces where it is long enough."""
    ids = torch.from_numpy(prompt[1:])
    top = most_likely(len(ids))
    told = {
        "prompt_logprob": -ids.float(),
        "prompt_rank": ids.int(),
        "prompt_top_ids": top["top_ids"],
        "prompt_top_logprobs": top["top_logprobs"],
    }
    return {name: list(values.split(2)) for name, values in told.items()}


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
    ends_with: int | None = None  # what stood in place of a token in the last row
    logprobs: list[np.void] = field(default_factory=list)
    prompt_logprobs: list[np.ndarray] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def num_ends(self) -> int:
        return len(self.finishes) + len(self.failures)


class Bench:
    """A conductor over the echo model, and what every request brought so far.

    ``steps_ahead``: most steps in flight between calls.
    """

    def __init__(
        self,
        *,
        pages=64,
        page_size=16,
        context=64,
        rows=8,
        queued=100,
        queued_tokens=0,
        queued_per_tenant=0,
        batch_tokens=256,
        largest_batch=None,
        steps_ahead=0,
        mixed=False,
        chunked=False,
        target_ms=0,
        prefix_passes=0,
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
        specs = [
            PagedKVSpec("kv_cache", {NODE}, kv),
            MoodSpec("mood", {NODE}),
            ToyGrammarSpec("grammar", {NODE}, VOCAB, list),
            ToyLogprobsSpec("logprobs", {NODE}, VOCAB),
        ]
        self.engine = Engine(
            {NODE: self.echo}, specs, device="cpu", dtype=torch.float32, kv_dtype=torch.float32, capacity=rows
        )
        loop = Loop(Node(NODE, ("token",), (Edge(NODE, "token"),)), max_iters=context, stop_signal="decode_loop")
        walks = [Walk("prefill", Node(NODE, ("token",))), Walk("decode", loop)]
        limits = Limits(
            max_running_requests=rows,
            max_queued_requests=queued,
            max_queued_tokens=queued_tokens,
            max_queued_requests_per_tenant=queued_per_tenant,
            max_batch_tokens=batch_tokens,
            max_seq_len=context,
            vocab_size=VOCAB,
            run_ahead=steps_ahead > 0,
            max_steps_ahead=max(steps_ahead, 1),
            mixed_steps=mixed,
            chunked_prefill=chunked,
            target_inter_token_ns=target_ms * 1_000_000,
            prefix_passes=prefix_passes,
        )
        if steps_ahead > 1:
            self.engine.can_queue = lambda batch: True  # the echo needs nothing of the host
        self.now_ns = 1000
        self.conductor = Conductor(self.engine, EchoModel(walks, specs), limits, clock=lambda: self.now_ns)
        self.grammars = self.engine.resources["grammar"]
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
        for prompt in report.prompt_logprobs:
            assert not self.outcomes[prompt.ticket].tokens, "told after the first token"
            self.outcomes[prompt.ticket].prompt_logprobs.append(prompt.logprobs)
        if report.logprob_rows is not None:
            for row, record in zip(report.logprob_rows.tolist(), report.logprobs, strict=True):
                assert report.tokens[row] != NO_TOKEN
                self.outcomes[int(report.request_ids[row])].logprobs.append(record)
        rows = zip(report.request_ids.tolist(), report.tokens.tolist(), report.finish.tolist(), strict=True)
        for request_id, token, finish in rows:
            outcome = self.outcomes[request_id]
            assert outcome.num_ends == 0, "a request was reported after its end"
            if token >= 0:
                outcome.tokens.append(token)
            else:
                outcome.ends_with = token
            if finish:
                outcome.finishes.append(finish)
        for failure in report.failures:
            self.outcomes[failure.request_id].failures.append(failure)
        return report

    def run(self, most_steps=2000) -> None:
        for _ in range(most_steps):
            if self.conductor.has_work():
                report = self.step()
                if report.is_empty and not report.num_stepped:
                    time.sleep(0.0005)  # somebody is being prepared
        assert not self.conductor.has_work(), f"still at work after {most_steps} steps"

    def assert_idle(self) -> None:
        """Everything a request can hold is back."""
        self.kv.check_pages()
        assert self.kv.free_pages == self.kv.num_usable_pages
        assert self.kv.promised_pages == 0
        assert self.conductor.num_running == self.conductor.num_queued == self.conductor.num_queued_tokens == 0
        assert not self.echo.counts
        assert self.grammars.steps_ahead == 0
        table = self.conductor._table  # while a flag of nobody is up, every step pays for it
        assert table.waits_for_host.count == table.asks_logprobs.count == table.asks_prompt.count == 0
