"""What a request asked for is what it gets, alone or beside others, however the engine happens to run its steps.

A tiny random model, so that every switch meets every feature: the reference is each request alone, one token after
the other.
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
from runtime.tiny import VOCAB, write_checkpoint
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from mstar.conductor import faults
from mstar.conductor.request import EngineRequest, FinishReason, Guide, LogitEdits, stop_code
from mstar.engine.accelerator_graph_backend import EagerBackend
from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions

ROWS, EOS, PAGE = 4, 0, 4
LETTERS = "?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-"
PROMPT = np.random.default_rng(3).integers(1, VOCAB, 11).tolist()  # two pages that all share, and some
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 4}
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Waking a second one costs more than there is to do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "filters": DRAWN | {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "top_p_min_keep": 3},
    "presence of prompt and output": GREEDY | {"repetition_penalty": 1.7},
    "presence of output": DRAWN | {"repetition_penalty": 3.0, "penalize_prompt": False},
    "window": DRAWN | {"repetition_penalty": 2.5, "repetition_window": 3},
    "counted": GREEDY | {"edits": LogitEdits(presence_penalty=0.5, frequency_penalty=1.5)},
    "bias and bad words": DRAWN | {"edits": LogitEdits(bias=((5, 4.0), (9, 3.0)), bad_words=((5, 9), (9, 5), (9, 9)))},
    "few allowed": DRAWN | {"edits": LogitEdits(allowed_ids=ids(2, 3, 5, 7))},
    "least length": DRAWN | {"edits": LogitEdits(bias=((EOS, 50.0),)), "min_tokens": 6},
    "least length of stop ids": DRAWN | {"edits": LogitEdits(bias=((7, 50.0),)), "stop_ids": (7, 8), "min_tokens": 4},
    "ends ignored": DRAWN | {"edits": LogitEdits(bias=((EOS, 4.0),)), "ignore_eos": True},
    "regex": DRAWN | {"guide": Guide("regex", "[a-f]{3}[0-9]{4,6}x?")},
    "choice": DRAWN | {"guide": Guide("choice", '["abba", "abbot", "b"]'), "min_tokens": 5},
    "nothing but ends left": DRAWN
    | {
        "guide": Guide("regex", "ab*"),
        "edits": LogitEdits(allowed_ids=ids(EOS, 1, 7)),
        "stop_ids": (7,),
        "min_tokens": 5,
        "ignore_eos": True,
    },
    "logprobs": DRAWN | {"num_logprobs": 3},
    "logprobs of the prompt": DRAWN | {"num_logprobs": 0, "num_prompt_logprobs": 2},
    "nothing left": GREEDY | {"edits": LogitEdits(allowed_ids=ids(5), bad_words=((5, 5),))},
    "all at once": DRAWN
    | {
        "top_k": 30,
        "repetition_penalty": 1.3,
        "edits": LogitEdits(presence_penalty=0.3, frequency_penalty=0.3, bias=((3, 2.0),), bad_words=((3, 4),)),
        "guide": Guide("regex", "[a-p]+"),
        "min_tokens": 5,
        "stop_ids": (6,),
        "num_logprobs": 2,
        "num_prompt_logprobs": 0,
    },
}
NAMES = list(FEATURES)


def request(number: int) -> EngineRequest:
    """Every third one has few tokens to make, so that rows change hands while others go on."""
    own = [*PROMPT, *np.random.default_rng(number).integers(1, VOCAB, number % 3).tolist()]
    return EngineRequest(prompt_ids=ids(*own), max_tokens=(14, 9, 5)[number % 3], **FEATURES[NAMES[number]])


@dataclass
class Outcome:
    """``logprobs`` and ``prompt_logprobs`` as bytes: not a bit may differ."""

    tokens: list[int] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[bytes] = field(default_factory=list)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(["?"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def core_of(folder: Path, **options: Any) -> EngineCore:
    settings: dict[str, Any] = {"run_ahead": "off", "mixed_steps": False, "prefix_cache": False} | options
    return EngineCore(
        EngineOptions(
            model=str(folder),
            device="cpu",
            kv_memory_bytes=1 << 20,
            page_size=PAGE,
            max_running_requests=ROWS,
            max_seq_len=64,
            deterministic=True,
            **{"max_batch_tokens": 64} | settings,
        )
    )


def play(core: EngineCore, numbers: list[int], cancelled: int | None = None) -> dict[int, Outcome]:
    """All requests by number, one more at each step; ``cancelled`` leaves after three tokens."""
    outcomes: dict[int, Outcome] = {}
    waiting, number_of = list(numbers), {}
    while waiting or core.has_work():
        if waiting:
            number = waiting.pop(0)
            number_of[core.submit(request(number))] = number
            outcomes[number] = Outcome()
        report = core.step()
        columns = (report.request_ids.tolist(), report.tokens.tolist(), report.finish.tolist())
        told = {} if report.logprobs is None else dict(zip(report.logprob_rows, report.logprobs, strict=True))
        for prompt in report.prompt_logprobs:
            outcomes[number_of[prompt.ticket]].prompt_logprobs.append(prompt.logprobs.tobytes())
        for row, (request_id, token, finish) in enumerate(zip(*columns, strict=True)):
            outcome = outcomes[number_of[request_id]]
            outcome.tokens += [token] if token != -1 else []
            outcome.ends += [FinishReason(finish)] if finish else []
            outcome.logprobs += [told[row].tobytes()] if row in told else []
            if number_of[request_id] == cancelled and len(outcome.tokens) == 3 and not outcome.ends:
                core.cancel(request_id)
        for failure in report.failures:
            outcomes[number_of[failure.request_id]].errors.append(failure.message)
    kv = core.engine.resources["kv_cache"]
    kv.check_pages()
    return outcomes


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, Outcome]:
    core = core_of(folder)
    return {number: play(core, [number])[number] for number in range(len(NAMES))}


def test_the_features_do_what_they_are_about(alone: dict[int, Outcome]) -> None:
    by_name = {name: alone[number] for number, name in enumerate(NAMES)}
    texts = {name: "".join(LETTERS[i] for i in outcome.tokens if i >= 0) for name, outcome in by_name.items()}
    for name, outcome in by_name.items():
        assert len(outcome.ends) + len(outcome.errors) == 1, name
    assert by_name["nothing left"].errors == [str(faults.error_of(faults.NOTHING_LEFT, 2))]
    assert by_name["nothing left"].tokens == [5]
    assert set(by_name["few allowed"].tokens) <= {2, 3, 5, 7}
    assert by_name["nothing but ends left"].tokens == [1, stop_code(7)]
    assert len(by_name["least length"].tokens) == 6
    assert by_name["least length of stop ids"].tokens[4:] == [stop_code(7)]
    assert EOS in by_name["ends ignored"].tokens
    assert texts["choice"] in ("abba", "abbot", "b")
    assert texts["regex"][:3].isalpha()
    assert texts["regex"][3:7].isdecimal()
    assert len(by_name["logprobs"].logprobs) == len(by_name["logprobs"].tokens)
    assert len(by_name["logprobs of the prompt"].prompt_logprobs) == 1
    assert len({tuple(outcome.tokens) for outcome in alone.values()}) >= len(NAMES) - 2


SCATTER, AHEAD = {"MSTAR_SAMPLER_INGRAPH_SCATTER": "1"}, {"MSTAR_PRE_PLAN_SPEC": "1"}
WAYS: list[tuple[str, bool, dict[str, str]]] = [
    ("off", False, {}),
    ("off", True, {}),
    ("on", False, {}),
    ("on", True, {}),
    ("off", False, SCATTER),
    ("on", True, SCATTER),
    ("on", True, {"MSTAR_DEVICE_LOOPBACK": "0"}),
    ("on", True, AHEAD),
    ("on", False, {"MSTAR_NUM_SLOTS": "3", "MSTAR_KV_PLAN_CACHE": "1"}),
    ("on", True, SCATTER | AHEAD | {"MSTAR_INGRAPH_DECODE_ROPE": "1", "MSTAR_KV_PINNED_INDPTRS": "1"}),
]


@pytest.mark.parametrize(("run_ahead", "mixed", "switches"), WAYS)
def test_requests_beside_each_other_give_what_each_gives_alone(
    folder: Path,
    alone: dict[int, Outcome],
    run_ahead: str,
    mixed: bool,
    switches: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    core = core_of(folder, run_ahead=run_ahead, mixed_steps=mixed)
    numbers = list(range(len(NAMES)))
    for order in (numbers, numbers[::-1]):  # other rows, other neighbours
        assert play(core, order) == alone
    assert bool(core.engine.steps["LLM", "mixed"]) is mixed
    assert {reason for *_, reason in core.engine.eager_steps} == {"prompt_logprobs"}


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_an_engine_that_captures_nothing_gives_the_same(
    folder: Path, alone: dict[int, Outcome], run_ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mstar.engine.engine._backend_for", lambda device: EagerBackend())
    core = core_of(folder, run_ahead=run_ahead, mixed_steps=True)
    assert play(core, list(range(len(NAMES)))) == alone
    assert sum(core.engine.eager_steps.values()) == sum(core.engine.steps.values())


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_a_warm_prefix_cache_gives_what_a_cold_one_does(
    folder: Path, alone: dict[int, Outcome], run_ahead: str
) -> None:
    core = core_of(folder, prefix_cache=True, run_ahead=run_ahead, mixed_steps=True)
    for _ in range(2):
        assert play(core, list(range(len(NAMES)))) == alone
    assert core.conductor.counters.cached_prompt_tokens > len(NAMES) * PAGE


@pytest.mark.parametrize(
    ("run_ahead", "mixed", "tokens", "cache", "switches"),
    [
        ("off", True, 5, False, {}),
        ("on", True, 1, False, SCATTER),
        ("on", False, 4, False, {}),
        ("on", True, 3, True, {}),
        ("on", True, 6, True, AHEAD | {"MSTAR_DEVICE_LOOPBACK": "0"}),
    ],
)
def test_prompts_in_parts_give_what_whole_ones_do(
    folder: Path,
    alone: dict[int, Outcome],
    run_ahead: str,
    mixed: bool,
    tokens: int,
    cache: bool,
    switches: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    core = core_of(folder, run_ahead=run_ahead, mixed_steps=mixed, max_batch_tokens=tokens, prefix_cache=cache)
    for _ in range(1 + cache):
        assert play(core, list(range(len(NAMES)))) == alone
    steps = core.engine.steps
    assert steps["LLM", "mixed"] + steps["LLM", "prefill"] > len(NAMES)
    assert not any(reason == "tokens" for *_, reason in core.engine.eager_steps)


@pytest.mark.parametrize(
    ("run_ahead", "mixed", "tokens", "cache", "host_pages", "switches"),
    [
        ("off", True, 64, False, 0, {}),
        ("on", True, 5, False, 0, SCATTER),
        ("on", False, 64, True, 0, {}),
        ("on", True, 3, True, 0, AHEAD | {"MSTAR_DEVICE_LOOPBACK": "0"}),
        ("on", True, 5, False, 20, {}),
    ],
)
def test_requests_that_give_their_pages_up_go_on_as_if_they_had_not(
    folder: Path,
    alone: dict[int, Outcome],
    run_ahead: str,
    mixed: bool,
    tokens: int,
    cache: bool,
    host_pages: int,
    switches: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Preemption, by computing again and through the host (BC-47)."""
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    core = core_of(
        folder,
        run_ahead=run_ahead,
        mixed_steps=mixed,
        max_batch_tokens=tokens,
        prefix_cache=cache,
        admission_policy="optimistic",
        preemption="offload",
        resources=json.dumps({"kv_cache": {"max_num_pages": 10 if cache else 14, "cpu_offload_pages": host_pages}}),
    )
    numbers = list(range(len(NAMES)))
    for order in (numbers, numbers[::-1]):
        assert play(core, order) == alone
    counters = core.conductor.counters
    assert counters.preemptions > 3
    assert (counters.offloads > 3) is (host_pages > 0)


@pytest.mark.parametrize("scatter", ["0", "1"])
@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_steps_that_fail_and_run_again_row_by_row_leave_no_trace(
    folder: Path, alone: dict[int, Outcome], run_ahead: str, scatter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSTAR_SAMPLER_INGRAPH_SCATTER", scatter)
    core = core_of(folder, run_ahead=run_ahead, mixed_steps=True)
    sampler = core.engine.resources["sampler"]
    sample, calls = sampler.sample, iter(range(10**6))

    def failing(logits):
        drawn = sample(logits)
        if logits.shape[0] > 1 and next(calls) % 3 == 2:
            raise RuntimeError("after the draw")
        return drawn

    sampler.sample = failing
    assert play(core, list(range(len(NAMES)))) == alone
    assert core.engine.counters["retried_steps"] > 5


@pytest.mark.parametrize("cancelled", ["presence of output", "counted", "regex", "logprobs"])
def test_who_cancels_disturbs_nobody_and_leaves_its_row_clean(
    folder: Path, alone: dict[int, Outcome], cancelled: str
) -> None:
    number = NAMES.index(cancelled)
    outcomes = play(core_of(folder, run_ahead="on", mixed_steps=True), list(range(len(NAMES))), number)
    gone = outcomes.pop(number)
    assert gone.ends == [FinishReason.CANCELLED]
    assert gone.tokens == alone[number].tokens[:3]
    assert outcomes == {each: outcome for each, outcome in alone.items() if each != number}
