"""Log-probabilities of the tokens that requests ask about, before anything changed their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from mstar.engine import strict_mode
from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.compositions import Compositions
from mstar.engine.resources.logprobs.config import LogprobsReqConfig, LogprobsSpec, LogprobsStep
from mstar.engine.resources.logprobs.prompts import Prompts, PromptStep
from mstar.engine.resources.spec import NodeResourceSpec, ResourceReqConfig
from mstar.engine.resources.static import StepBuffer
from mstar.engine.resources.step import BucketKey, ResourceStep, StepContext
from mstar.kernels import logprobs
from mstar.kernels.cpu import top_tokens as cpu_top_tokens
from mstar.kernels.logprobs import Told, tell
from mstar.utils.errors import shorten

_SLICE = 64  # prompt positions whose logits exist at once
_NOTHING = LogprobsReqConfig()


@dataclass(frozen=True, eq=False)
class _Asking:
    """Which rows of a batch composition ask: ``index`` int64 [m] are their places, and None is all.  ``num_top`` int64
    [m], of which ``most`` is the largest."""

    index: torch.Tensor | None
    num_top: torch.Tensor
    most: int


@dataclass
class _PlannedStep:
    asking: _Asking
    prompts: PromptStep | None
    raw: torch.Tensor | None = None


class Logprobs(Resource):
    """Tells of the rows that ask; the others cost nothing, and are 0 and -1 in what it returns.

    On the CPU it looks at asking rows alone.  Elsewhere a leased step is told of whole, since its graph can't know who
    asks; only how many tokens a row wants is written for each step.
    """

    def __init__(self, spec: LogprobsSpec, info: EngineResourceInfo) -> None:
        self._max_top, self._vocab, self._capacity = spec.max_top, spec.vocab_size, info.capacity
        self._device = info.device
        self._top = cpu_top_tokens.top_tokens if info.device.type == "cpu" else logprobs.top_tokens
        self._num_top = np.full(info.total_rows, -1, np.int64)
        self._num_top_of_step = StepBuffer(torch.int64, info.device, info.num_slots)
        self._prompts = Prompts(info.total_rows)
        self._row_of: dict[int, int] = {}
        self._version = 0  # moves whenever a row's number does
        self._known: Compositions[_Asking] = Compositions()
        self._untold: dict[int, dict[str, torch.Tensor]] = {}  # by rows: of steps that nobody asks about
        self._planned: _PlannedStep | None = None

    @classmethod
    def build(cls, spec: NodeResourceSpec, info: EngineResourceInfo) -> Self:
        assert isinstance(spec, LogprobsSpec)
        return cls(spec, info)

    def ingest_request(self, request_id: int, row: int, config: ResourceReqConfig | None) -> None:
        """Takes a :class:`LogprobsReqConfig` (None asks nothing) for master row ``row``.

        A request that is already there keeps its place in its prompt.  Padding rows ask nothing.

        Raises:
            ValueError: a number outside its range, or a prompt that cannot be told of; names the field.
        """
        if row >= self._capacity:
            return
        if config is not None:
            assert isinstance(config, LogprobsReqConfig)
            self._check(config)
        if self._row_of.get(request_id) != row:
            self._row_of[request_id] = row
            self._prompts.start(row, 0)
        self._set(row, config or _NOTHING)

    def remove_request(self, request_id: int, row: int) -> None:
        if self._row_of.pop(request_id, None) is not None:
            self._set(row, _NOTHING)

    def apply_cached_prefix(
        self, request_id: int, row: int, matched_len: int, matched_ids: np.ndarray | None = None
    ) -> None:
        """Nothing is told of the skipped tokens: who asks about a prompt has to run it."""
        self._prompts.start(row, matched_len)

    def plan(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, LogprobsStep)
        self._planned = _PlannedStep(self._asking_of(ctx), self._prompts.of_step(ctx))

    def observe(self, logits: torch.Tensor) -> None:
        """Keeps what is asked of ``logits`` [rows, vocab], which may be changed afterwards."""
        planned = self._planned
        assert planned is not None, "observe before plan"
        index = planned.asking.index
        with strict_mode.opaque("logprobs_observe"):
            if index is None:
                planned.raw = logits.to(torch.float32, copy=True)
            elif index.numel():
                planned.raw = logits.index_select(0, index).float()

    def of(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is told of ``tokens`` int64 [rows], drawn from the observed logits.

        Returns:
            ``logprob`` fp32 [rows], ``logprob_rank`` int32 [rows], ``top_ids`` int32 and ``top_logprobs`` fp32
            [rows, max_top]: the most likely tokens first, past those a row asked for -1 and 0.  Read only.
        """
        planned = self._planned
        assert planned is not None, "of before plan"
        asking, raw = planned.asking, planned.raw
        with strict_mode.opaque("logprobs_of"):
            if raw is None:
                return self._of_nobody(tokens.numel())
            chosen = tokens if asking.index is None else tokens.index_select(0, asking.index)
            told = tell(raw, chosen, asking.num_top, asking.most, self._max_top, self._top)
            if asking.index is None:
                return _named(told)
            named = self._new_untold(tokens.numel())
            for whole, part in zip(named.values(), told, strict=True):
                whole.index_copy_(0, asking.index, part)
            return named

    @property
    def wants_prompt(self) -> bool:
        """Whether a row of the planned step has prompt tokens to tell of."""
        return self._planned is not None and self._planned.prompts is not None

    def of_prompts(
        self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[int, dict[str, list[Any]]]:
        """What is told of the prompt tokens that this step's positions predict; those of a chunk's next token count to
        the chunk.

        Args:
            hidden: [tokens, H] of all tokens of the step in row order.
            head: from hidden states [n, H] to logits [n, vocab]; called on slices of a few rows.

        Returns:
            By request id, for those that ask and have any: ``prompt_logprob`` fp32 [n], ``prompt_rank`` int32 [n],
            ``prompt_top_ids`` int32 and ``prompt_top_logprobs`` fp32 [n, max_top], each alone in a list.
        """
        assert self._planned is not None, "of_prompts before plan"
        prompts = self._planned.prompts
        if prompts is None:
            return {}
        at, targets, num_top = (
            torch.from_numpy(column).to(self._device) for column in (prompts.at, prompts.targets, prompts.num_top)
        )
        most = int(prompts.num_top.max())
        slices = zip(at.split(_SLICE), targets.split(_SLICE), num_top.split(_SLICE), strict=True)
        told = [
            tell(head(hidden.index_select(0, here)).float(), wanted, count, most, self._max_top, self._top)
            for here, wanted, count in slices
        ]
        columns = [torch.cat(parts).split(prompts.lengths) for parts in zip(*told, strict=True)]
        names = ("prompt_logprob", "prompt_rank", "prompt_top_ids", "prompt_top_logprobs")
        return {
            request_id: {name: [own] for name, own in zip(names, parts, strict=True)}
            for request_id, *parts in zip(prompts.request_ids, *columns, strict=True)
        }

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        self._planned = None
        self._prompts.advance(ctx)

    def abandon(self, step: ResourceStep, ctx: StepContext) -> None:
        self._planned = None

    def build_accelerator_graph_buffers(self, buckets: Sequence[BucketKey], max_bs: int, max_seq_len: int) -> None:
        if self._device.type != "cpu":
            self._num_top_of_step.reserve(max_bs)

    def _asking_of(self, ctx: StepContext) -> _Asking:
        if ctx.slot_lease is not None and self._device.type != "cpu":
            num_top = self._num_top_of_step.put(self._num_top[ctx.rows], ctx.slot_lease)
            return _Asking(None, num_top, self._max_top)
        known = self._known.find(self._version, ctx.rows)
        if known is not None:
            return known
        num_top = self._num_top[ctx.rows]
        places = np.flatnonzero(num_top >= 0)
        index, wanted = (torch.from_numpy(column).to(self._device) for column in (places, num_top[places]))
        asking = _Asking(index, wanted, int(num_top.max(initial=-1)))
        return self._known.keep(asking, self._version, ctx.rows)

    def _of_nobody(self, rows: int) -> dict[str, torch.Tensor]:
        untold = self._untold.get(rows)
        if untold is None:
            untold = self._untold[rows] = self._new_untold(rows)
        return untold

    def _new_untold(self, rows: int) -> dict[str, torch.Tensor]:
        return _named(
            Told(
                torch.zeros(rows, device=self._device),
                torch.zeros(rows, dtype=torch.int32, device=self._device),
                torch.full((rows, self._max_top), -1, dtype=torch.int32, device=self._device),
                torch.zeros(rows, self._max_top, device=self._device),
            )
        )

    def _set(self, row: int, config: LogprobsReqConfig) -> None:
        if self._num_top[row] != config.num_top:
            self._num_top[row] = config.num_top
            self._version += 1
        if config.num_prompt_top >= 0:
            self._prompts.put(row, np.asarray(config.prompt_ids, np.int64), config.num_prompt_top)
        else:
            self._prompts.drop(row)

    def _check(self, config: LogprobsReqConfig) -> None:
        for name, value in (("logprobs", config.num_top), ("prompt_logprobs", config.num_prompt_top)):
            if not isinstance(value, int) or not -1 <= value <= self._max_top:
                raise ValueError(
                    f"{name} must be an integer in 0..{self._max_top}, or -1 for none, got {shorten(value)}"
                )
        if config.num_prompt_top < 0:
            return
        if config.prompt_ids is None:
            raise ValueError("prompt_logprobs needs a prompt of token ids, got none")
        ids = np.asarray(config.prompt_ids)
        wrong = ids[(ids < 0) | (ids >= self._vocab)]
        if wrong.size:
            raise ValueError(f"prompt ids must be in 0..{self._vocab - 1}, got {int(wrong[0])}")


def _named(told: Told) -> dict[str, torch.Tensor]:
    return {
        "logprob": told.logprob,
        "logprob_rank": told.rank,
        "top_ids": told.top_ids,
        "top_logprobs": told.top_logprobs,
    }
