"""Which open requests their clients have cancelled: one thread asks for all of them, in turn."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from mstar.serving.sequences import Sequences

logger = logging.getLogger(__name__)

ROUND_S = 0.02  # at least, between two asks of one request
# Until it is true an ask is a round trip: some 40 us, 11 of them CPU time of the thread that asks, and 50 of others and
# the server; 110 us where 1,024 requests are open.  So all of 256 are asked within 40 ms, all of 1,024 within 350.
CPU_SHARE = 0.1  # of a core for the thread, at most
SHARE = 0.5  # of its time, at most: an ask takes long where the server is slow, or others have the interpreter
ASKS = 64  # in one go


class CancelPoll:
    """Asks the requests of ``open_requests``, by number, and calls ``on_cancel`` with those that are cancelled."""

    def __init__(self, open_requests: Mapping[int, Sequences], on_cancel: Callable[[int, Sequences], None]) -> None:
        self._open = open_requests
        self._on_cancel = on_cancel
        self._to_ask: list[int] = []  # numbers whose turn comes in this round
        self._num_goes = 1  # of this round
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mstar-cancel", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        rest_s = ROUND_S
        while not self._stop.wait(rest_s):
            rest_s = self._go()  # a call, so that no local keeps the last request, and with it its sender, alive

    def _go(self) -> float:
        """Asks the next few; how long to rest then."""
        began, cpu_began = time.monotonic(), time.thread_time()
        if not self._to_ask:
            self._to_ask = list(self._open)
            self._num_goes = max(-(-len(self._to_ask) // ASKS), 1)
        asked, self._to_ask = self._to_ask[:ASKS], self._to_ask[ASKS:]
        for number in asked:
            sequences = self._open.get(number)
            if sequences is not None and not sequences.is_abandoned and self._is_cancelled(sequences):
                self._on_cancel(number, sequences)
        took_s, cpu_s = time.monotonic() - began, time.thread_time() - cpu_began
        return max(ROUND_S / self._num_goes, took_s / SHARE, cpu_s / CPU_SHARE) - took_s

    def _is_cancelled(self, sequences: Sequences) -> bool:
        try:
            return sequences.reply.is_cancelled()
        except Exception:  # a server that cannot say: the request goes on
            logger.exception("request %r: cancellation could not be read", sequences.request_id)
            return False
