"""Whole engines whose steps are captured: batches between two captured sizes, spoiled padding, a spoiled row.

A tiny random model.  The same tests run on a CPU, where a replay calls what was captured, and, marked ``gpu``, over
real graphs.  Everything is deterministic, so not a bit may depend on the company that a request has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from mstar.conductor.request import EngineRequest, FinishReason, Guide, LogitEdits
from mstar.engine.accelerator_graph_backend import EagerBackend
from mstar.model.decoder import Decoder
from mstar.model.engine_model import EngineModel
from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions
from mstar.utils.errors import ErrorCode

LETTERS = "?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-"
VOCAB, HIDDEN, EOS = len(LETTERS), 128, 0
POISON = VOCAB - 1  # a token whose embedding is not a number, and that nobody draws unasked
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}
IN_GRAPH = ("MSTAR_INGRAPH_DECODE_ROPE", "MSTAR_INGRAPH_DECODE_TOKENS", "MSTAR_SAMPLER_INGRAPH_SCATTER")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("runs on the GPU where there is one")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waking a second one costs more than there is to do
    yield request.param
    torch.set_num_threads(threads)


@pytest.fixture(params=["0", "1"], ids=["sent", "in-graph"])
def switches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether a decode step takes tokens, positions and draw counts from the host or from the device."""
    for name in IN_GRAPH:
        monkeypatch.setenv(name, request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(["?"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class SpoiledCore(EngineCore):
    """Changes the model before anything is captured.

    POISON's embedding is not a number, and its logit low.  In steps of ``spoiled_rows`` in all, what is embedded of the
    rows from ``first_spoiled`` on becomes not a number either; ``is_spoiled`` bool [spoiled_rows] says whose logits
    were not in the last such step.
    """

    def __init__(self, options: EngineOptions, spoiled_rows: int = 0, first_spoiled: int = 0) -> None:
        self._rows, self._first = spoiled_rows, first_spoiled
        super().__init__(options)
        self.is_spoiled.zero_()

    def _load(self, device: torch.device) -> EngineModel:
        model = super()._load(device)
        decoder = model.submodules["LLM"].decoder
        assert isinstance(decoder, Decoder)
        self.is_spoiled = torch.zeros(self._rows, dtype=torch.bool, device=device)
        self._nan = torch.tensor(float("nan"), device=device)  # as a number, strict captures would not know it again
        decoder.embedding.weight[POISON] = float("nan")
        decoder.register_forward_pre_hook(self._spoil)
        decoder.register_forward_hook(self._look)
        return model

    def _spoil(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments[0].shape[0] == self._rows:
            arguments[0][self._first :].copy_(self._nan)

    def _look(self, module: torch.nn.Module, arguments: tuple[Any, ...], logits: torch.Tensor) -> None:
        if arguments[0].shape[0] == logits.shape[0] == self._rows:
            self.is_spoiled.copy_(logits.isnan().any(1))
        logits[:, POISON].fill_(-50.0)


def options_of(folder: Path, device: str, **options: Any) -> EngineOptions:
    settings: dict[str, Any] = {"max_seq_len": 128, "max_batch_tokens": 128, "run_ahead": "on"} | options
    return EngineOptions(
        model=str(folder),
        load_format="dummy",
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        kv_memory_bytes=4 << 20,
        prefix_cache=False,
        deterministic=True,
        **settings,
    )


@dataclass
class Outcome:
    """``end`` is a finish reason or an error's code; ``logprobs`` are bytes."""

    tokens: list[int] = field(default_factory=list)
    end: FinishReason | ErrorCode | None = None
    logprobs: list[bytes] = field(default_factory=list)


def play(core: EngineCore, requests: list[EngineRequest], sizes: list[int] | None = None) -> list[Outcome]:
    """All requests, submitted at once; ``sizes`` takes the rows of each step."""
    outcomes = {core.submit(request): Outcome() for request in requests}
    while core.has_work():
        report = core.step()
        if sizes is not None:
            sizes.append(report.num_stepped)
        told = {} if report.logprobs is None else dict(zip(report.logprob_rows.tolist(), report.logprobs, strict=True))
        columns = (report.request_ids.tolist(), report.tokens.tolist(), report.finish.tolist())
        for row, (request_id, token, finish) in enumerate(zip(*columns, strict=True)):
            outcome = outcomes[request_id]
            outcome.tokens += [token] if token != -1 else []
            outcome.logprobs += [told[row].tobytes()] if row in told else []
            if finish:
                assert outcome.end is None
                outcome.end = FinishReason(finish)
        for failure in report.failures:
            assert outcomes[failure.request_id].end is None
            outcomes[failure.request_id].end = failure.code
    kv = core.engine.resources["kv_cache"]
    kv.check_pages()
    assert kv.free_pages == kv.num_usable_pages
    return list(outcomes.values())


def prompt(number: int, length: int) -> bytes:
    return np.random.default_rng(number).integers(1, POISON, length).astype("<i4").tobytes()


# Batches between two captured sizes.

STEPS, MOST = {"cpu": 12, "cuda": 50}, 17


def greedy_or_drawn(number: int, steps: int) -> EngineRequest:
    sampling = {"temperature": 0.9, "top_p": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}
    return EngineRequest(prompt_ids=prompt(number, 1 + 5 * number), max_tokens=steps, ignore_eos=True, **sampling)


def test_any_number_of_rows_between_two_captured_sizes_gives_the_tokens_of_eager_steps(
    folder: Path, device: str, switches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [greedy_or_drawn(number, STEPS[device]) for number in range(MOST)]
    options = options_of(folder, device, max_running_requests=24, capture_batch_sizes=(1, 4, 8, 16, 24))
    core = EngineCore(options)
    with monkeypatch.context() as patch:
        patch.setattr("mstar.engine.engine._backend_for", lambda device: EagerBackend())
        eager = EngineCore(options)
    wanted = play(eager, requests)
    assert sum(eager.engine.eager_steps.values()) == sum(eager.engine.steps.values())
    assert len({tuple(outcome.tokens) for outcome in wanted}) == MOST
    for rows in range(1, MOST + 1):
        assert play(core, requests[:rows]) == wanted[:rows], f"{rows} rows"
    assert not core.engine.eager_steps


# Padding that is not a number.

REAL, BUCKET, CONTEXT = 5, 8, 8192


def short_or_long(number: int, num_logprobs: int) -> EngineRequest:
    sampling = {"temperature": 0.8, "top_k": 20, "seed": number} if number % 2 else {"temperature": 0.0}
    length = 700 if number == REAL - 1 else 3 + 16 * number
    return EngineRequest(
        prompt_ids=prompt(number, length), max_tokens=40, ignore_eos=True, num_logprobs=num_logprobs, **sampling
    )


@pytest.mark.parametrize("num_logprobs", [-1, 2], ids=["plain", "full"])
def test_padding_that_is_not_a_number_and_stale_pages_reach_no_real_row(
    folder: Path, device: str, switches: str, num_logprobs: int
) -> None:
    settings = {"max_running_requests": BUCKET, "capture_batch_sizes": (BUCKET,)}
    options = options_of(folder, device, max_seq_len=CONTEXT, **settings | {"max_batch_tokens": 1024})
    requests = [short_or_long(number, num_logprobs) for number in range(REAL)]
    wanted = play(SpoiledCore(options), requests)
    core = SpoiledCore(options, BUCKET, REAL)
    core.engine.resources["kv_cache"].cache.fill_(float("nan"))
    assert play(core, requests) == wanted
    assert core.is_spoiled.tolist() == [False] * REAL + [True] * (BUCKET - REAL)
    assert [len(outcome.tokens) for outcome in wanted] == [40] * REAL
    assert not core.engine.eager_steps


# One row among many that is not a number.

ROWS, BAD = {"cpu": 24, "cuda": 64}, 17
DRAWN: dict[str, Any] = {"temperature": 1.0}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    DRAWN,
    DRAWN | {"top_p": 0.9},
    DRAWN | {"top_k": 8, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    DRAWN | {"repetition_penalty": 2.0, "repetition_window": 4},
    DRAWN | {"edits": LogitEdits(presence_penalty=0.5, frequency_penalty=0.5, bad_words=((5, 9), (7,)))},
    DRAWN | {"edits": LogitEdits(bias=((3, 2.0),), allowed_ids=prompt(0, 20)), "min_tokens": 3},
    DRAWN | {"guide": Guide("regex", "[a-f]{3}[0-9]{4,6}x?")},
    DRAWN | {"num_logprobs": 3, "top_p_first": True, "top_k": 30, "top_p": 0.95},
]


def mixed_request(number: int) -> EngineRequest:
    """Number BAD is made to draw POISON first, so its second step, among all the others, is not a number."""
    settings = SETTINGS[number % len(SETTINGS)] | {"seed": number}
    if number == BAD:
        settings = {"temperature": 0.0, "edits": LogitEdits(bias=((POISON, 200.0),))}
    return EngineRequest(prompt_ids=prompt(number, 1 + number % 11), max_tokens=10 + number % 9, **settings)


def test_a_row_that_is_not_a_number_fails_alone_among_requests_of_every_kind(
    folder: Path, device: str, switches: str
) -> None:
    rows = ROWS[device]
    options = options_of(folder, device, max_running_requests=rows, capture_batch_sizes=(1, rows // 2, rows))
    core = SpoiledCore(options)
    requests = [mixed_request(number) for number in range(rows)]
    alone = [play(core, [request])[0] for request in requests]
    for _ in range(2):  # the second time on pages that hold what is not a number
        sizes: list[int] = []
        assert play(core, requests, sizes) == alone
    assert alone[BAD] == Outcome([POISON], ErrorCode.INTERNAL)
    assert all(isinstance(alone[number].end, FinishReason) for number in range(rows) if number != BAD)
    assert core.conductor.counters.row_faults == 3
    assert max(sizes) > rows // 2, "the row failed in a step of many"
    assert not core.engine.eager_steps
