"""Whose tokens are told of, and what is told of prompts: alike wherever the tokens are told."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mstar.engine.resources.base import EngineResourceInfo, Resource
from mstar.engine.resources.logprobs.config import LogprobsReqConfig, LogprobsSpec
from mstar.engine.resources.logprobs.prompts import Prompts, PromptStep
from mstar.engine.resources.spec import ResourceReqConfig
from mstar.engine.resources.step import ResourceStep, StepContext
from mstar.kernels.logprobs import Told
from mstar.utils.errors import shorten

_SLICE = 64  # prompt positions whose logits exist at once
_NOTHING = LogprobsReqConfig()


class LogprobsOfRequests(Resource):
    """Tells of the rows that ask; the others cost nothing, and are 0 and -1 in what it returns."""

    def __init__(self, spec: LogprobsSpec, info: EngineResourceInfo) -> None:
        self._max_top, self._vocab, self._capacity = spec.max_top, spec.vocab_size, info.capacity
        self._device = info.device
        self._num_top = np.full(info.total_rows, -1, np.int64)
        self._version = 0  # moves whenever a row's number does
        self._prompts = Prompts(info.total_rows)
        self._prompt_step: PromptStep | None = None  # of the planned step
        self._row_of: dict[int, int] = {}
        self._untold: dict[int, dict[str, torch.Tensor]] = {}  # by rows: of steps that nobody asks about

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
        self._prompt_step = self._prompts.of_step(ctx)

    @abstractmethod
    def observe(self, logits: torch.Tensor) -> None:
        """Keeps what is asked of ``logits`` [rows, vocab], which on a device must stay as they are until :meth:`of`."""

    @abstractmethod
    def of(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is told of ``tokens`` int64 [rows], drawn from the observed logits.

        Returns:
            ``logprob`` fp32 [rows], ``logprob_rank`` int32 [rows], ``top_ids`` int32 and ``top_logprobs`` fp32
            [rows, max_top]: the most likely tokens first, past those a row asked for -1 and 0.  Read only.
        """

    @abstractmethod
    def _told(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: torch.Tensor, most: int) -> Told:
        """As :func:`mstar.kernels.logprobs.tell`, of logits of any float dtype."""

    @property
    def wants_prompt(self) -> bool:
        """Whether a row of the planned step has prompt tokens to tell of."""
        return self._prompt_step is not None

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
        prompts = self._prompt_step
        if prompts is None:
            return {}
        at, targets, num_top = (
            torch.from_numpy(column).to(self._device, non_blocking=True)
            for column in (prompts.at, prompts.targets, prompts.num_top)
        )
        most = int(prompts.num_top.max())
        slices = zip(at.split(_SLICE), targets.split(_SLICE), num_top.split(_SLICE), strict=True)
        told = [self._told(head(hidden.index_select(0, here)), wanted, count, most) for here, wanted, count in slices]
        columns = [torch.cat(parts).split(prompts.lengths) for parts in zip(*told, strict=True)]
        names = ("prompt_logprob", "prompt_rank", "prompt_top_ids", "prompt_top_logprobs")
        return {
            request_id: {name: [own] for name, own in zip(names, parts, strict=True)}
            for request_id, *parts in zip(prompts.request_ids, *columns, strict=True)
        }

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        self._prompt_step = None
        self._prompts.advance(ctx)

    def abandon(self, step: ResourceStep, ctx: StepContext) -> None:
        self._prompt_step = None

    def _of_nobody(self, rows: int) -> dict[str, torch.Tensor]:
        untold = self._untold.get(rows)
        if untold is None:
            untold = self._untold[rows] = self._new_untold(rows)
        return untold

    def _new_untold(self, rows: int) -> dict[str, torch.Tensor]:
        return named(
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


def named(told: Told) -> dict[str, torch.Tensor]:
    return {
        "logprob": told.logprob,
        "logprob_rank": told.rank,
        "top_ids": told.top_ids,
        "top_logprobs": told.top_logprobs,
    }
