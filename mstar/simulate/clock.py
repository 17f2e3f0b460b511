"""Virtual time: a host that decides and a device that computes beside it."""

from __future__ import annotations


class VirtualClock:
    """Nanoseconds since the start; calling it tells the host's time.  Neither time ever goes back.

    ``busy_ns``: what the device has been given to do so far.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.busy_ns = 0
        self._device_free_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def spend(self, nanoseconds: int) -> None:
        """The host works for so long."""
        assert nanoseconds >= 0, "time went back"
        self.now_ns += nanoseconds

    def wait_until(self, time_ns: int) -> None:
        """The host sleeps until then; not at all if that is over."""
        self.now_ns = max(self.now_ns, time_ns)

    def run_on_device(self, nanoseconds: int) -> int:
        """Queues work behind what the device has to do already; when it will be done."""
        assert nanoseconds >= 0, "time went back"
        self._device_free_ns = max(self.now_ns, self._device_free_ns) + nanoseconds
        self.busy_ns += nanoseconds
        return self._device_free_ns
