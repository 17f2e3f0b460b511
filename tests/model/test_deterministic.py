"""With ``deterministic``, a request's logits are equal bit for bit whatever the engine does beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mstar.conductor.request import EngineRequest
from mstar.engine.batch import Batch
from mstar.kernels import rope, row_ops
from mstar.kernels.cpu import jit, paged_decode, panel_gemm
from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions

from .small_checkpoints import CLASSES, random_model, save

VOCABULARY = 160
COMPILED = (
    panel_gemm._make,
    paged_decode.paged_decode_kernel,
    row_ops._norm_kernel,
    row_ops._silu_kernel,
    rope._rotate_kernel,
)


class Deterministic:
    """A whole engine whose every step's logits are kept, by request."""

    def __init__(self, model: str, **options: Any) -> None:
        self.core = EngineCore(EngineOptions(model=model, device="cpu", deterministic=True, **options))
        self.walks: set[str] = set()
        self._steps: list[tuple[tuple[int, ...], torch.Tensor]] = []
        self._request_ids: tuple[int, ...] = ()
        self._launch = self.core.engine.launch
        self.core.engine.launch = self._note_rows
        self.core.model.submodules["LLM"].decoder.register_forward_hook(self._keep)

    def _note_rows(self, batch: Batch) -> Any:
        self.walks.add(batch.graph_walk)
        self._request_ids = batch.request_ids
        return self._launch(batch)

    def _keep(self, module: Any, arguments: Any, logits: torch.Tensor) -> None:
        self._steps.append((self._request_ids, logits.clone()))

    def run(
        self, prompt: list[int], tokens: int, others: Sequence[tuple[list[int], int]] = (), steps_ahead: int = 0
    ) -> tuple[list[int], torch.Tensor, int]:
        """Greedy ids and logits [tokens, vocabulary] of ``prompt``, and how many of its tokens a prefix cache had.

        ``others`` are prompts and tokens to make; they come behind it, or ``steps_ahead`` steps before it.
        """
        self._steps.clear()
        if steps_ahead:
            self._submit(others)
            for _ in range(steps_ahead):
                self.core.step()
        (own,) = self._submit([(prompt, tokens)])
        if not steps_ahead:
            self._submit(others)
        ids: list[int] = []
        cached = 0
        while self.core.has_work():
            report = self.core.step()
            assert not report.failures
            cached += report.cached_prompt_tokens
            ids += report.tokens[report.request_ids == own].tolist()
        logits = [rows[request_ids.index(own)] for request_ids, rows in self._steps if own in request_ids]
        return ids, torch.stack(logits[: len(ids)]), cached

    def _submit(self, prompts: Sequence[tuple[list[int], int]]) -> list[int]:
        fields: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
        return [
            self.core.submit(EngineRequest(prompt_ids=np.array(ids, "<i4").tobytes(), max_tokens=tokens, **fields))
            for ids, tokens in prompts
        ]


def random_prompts(count: int, seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, int(random.integers(1, 60))).tolist() for _ in range(count)]


def companies(
    engine: Deterministic, prompt: list[int], tokens: int, neighbours: Sequence[int]
) -> Iterator[tuple[str, list[int], torch.Tensor]]:
    """What ``prompt`` gives beside others, after others, and behind a cached prefix."""
    for count in neighbours:
        others = [(ids, 1 + i % (tokens + 4)) for i, ids in enumerate(random_prompts(count, count))]
        yield (f"{count} neighbours", *engine.run(prompt, tokens, others)[:2])
        yield (f"{count} earlier neighbours", *engine.run(prompt, tokens, others, steps_ahead=2)[:2])
    for other in random_prompts(10, 99):
        engine.run(other, 3)
    yield ("after 10 other requests", *engine.run(prompt, tokens)[:2])
    for cut in (20, 40, len(prompt)):
        engine.run([*prompt[:cut], 5, 6, 7], 2)
        ids, logits, cached = engine.run(prompt, tokens)
        assert cached >= (cut - 1) // 16 * 16
        yield f"{cut} tokens cached", ids, logits


def assert_equal_in_all_companies(
    engine: Deterministic, prompt: list[int], tokens: int, neighbours: Sequence[int]
) -> None:
    wanted_ids, wanted, cached = engine.run(prompt, tokens)
    assert (len(wanted_ids), cached) == (tokens, 0)
    differing = {
        name: float((logits - wanted).abs().max())
        for name, ids, logits in companies(engine, prompt, tokens, neighbours)
        if ids != wanted_ids or not torch.equal(logits, wanted)
    }
    assert differing == {}


@pytest.mark.model
def test_the_real_model_gives_the_same_bits_alone_and_in_any_company() -> None:
    engine = Deterministic("smollm2-135m", kv_memory_bytes=256 << 20, max_running_requests=32)
    prompt = np.random.default_rng(0).integers(0, 49152, 70).tolist()
    assert_equal_in_all_companies(engine, prompt, 12, (1, 7, 31))
    assert engine.walks >= {"prefill", "decode"}


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine without llvmlite: every operator is torch's."""
    monkeypatch.setattr(jit, "llvm", None)
    for kernel in COMPILED:
        kernel.cache_clear()
    yield
    for kernel in COMPILED:
        kernel.cache_clear()


SMALL = {"kv_memory_bytes": 8 << 20, "max_running_requests": 32}
PROMPT = random_prompts(30, 1)[-1] + list(range(60))


@pytest.mark.parametrize("options", [{}, {"mixed_steps": False, "page_size": 4}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("family", CLASSES)
def test_every_family_gives_the_same_bits_alone_and_in_any_company(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder = save(random_model(family, num_attention_heads=4), tmp_path)
    assert_equal_in_all_companies(Deterministic(str(folder), **SMALL | options), PROMPT, 6, (1, 7, 31))


@pytest.mark.parametrize("family", CLASSES)
def test_torch_alone_gives_the_same_bits_alone_and_in_any_company(
    family: str, tmp_path: Path, without_compiler: None
) -> None:
    folder = save(random_model(family, num_attention_heads=4), tmp_path)
    engine = Deterministic(str(folder), **SMALL)
    assert engine.core.model.submodules["LLM"].decoder.head.backend == "torch"
    assert_equal_in_all_companies(engine, PROMPT, 6, (1, 7, 31))
