"""Tokens that requests have kept, on their way to the resources that want to know of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np

from mstar.engine.resources.base import Resource, RowVerdict

log = logging.getLogger(__name__)


class KeptTokens:
    """Tells resources of sampled tokens once they are on the host and their requests have kept them."""

    def __init__(self, resources: Iterable[Resource], settle: Callable[[], None]) -> None:
        """``settle`` is called before any resource is: it waits for whoever else may be at work on them."""
        self._settle = settle
        every = list(resources)
        self._accepting = [each for each in every if each.overrides("accept_tokens")]
        self._chains = [each for each in every if each.overrides("extend_prefix_chains")]

    def extend_prefix_chains(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Tokens int64 [n] that were kept by the requests on master rows ``rows`` int64 [n]."""
        if not self._chains:
            return
        self._settle()
        for resource in self._chains:
            resource.extend_prefix_chains(rows, tokens)

    def accept(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray | None:
        """Tokens int64 [n] that the requests on master rows ``rows`` int64 [n] kept: the gravest
        :class:`~mstar.engine.resources.base.RowVerdict` of any resource, uint8 [n]; None: all go on.

        Where a resource raises, nobody knows how far it came: these rows are BROKEN."""
        verdicts = None
        for resource in self._accepting:
            self._settle()
            try:
                found = resource.accept_tokens(rows, tokens)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a panic of a library written in Rust is no Exception
                log.exception("%s: the tokens of %d rows were not taken", type(resource).__name__, rows.size)
                found = np.full(rows.size, RowVerdict.BROKEN, np.uint8)
            if found is not None:
                verdicts = found if verdicts is None else np.maximum(verdicts, found)
        return verdicts

    def reason_of(self, row: int) -> str:
        """Why a row is BROKEN, see :meth:`~mstar.engine.resources.base.Resource.reason_of`; empty where no resource
        blames the request."""
        return next(filter(None, (resource.reason_of(row) for resource in self._accepting)), "")
