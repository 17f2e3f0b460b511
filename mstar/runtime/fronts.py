"""The engine's side of its front ends: who they are, what they run, whether they live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from mstar.runtime.messages import Hello
from mstar.runtime.presence import EngineFolder, FrontRecord
from mstar.runtime.processes import ExitWatch

HUNG_AFTER_S = 30.0  # without a beat, though its process exists


@dataclass
class Front:
    """One front end.  ``tickets`` maps its open requests to the engine's ids; ``number`` is never used again."""

    number: int
    name: str
    address: bytes
    watch: ExitWatch
    last_beat: float
    tickets: dict[int, int] = field(default_factory=dict)
    is_hung: bool = False


class Fronts:
    """Front ends by name and by number."""

    def __init__(self, folder: EngineFolder) -> None:
        self._folder = folder
        self._by_name: dict[str, Front] = {}
        self._by_number: dict[int, Front] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Front]:
        return iter(self._by_name.values())

    def by_name(self, name: str) -> Front | None:
        return self._by_name.get(name)

    def by_number(self, number: int) -> Front | None:
        return self._by_number.get(number)

    def add(self, hello: Hello, address: bytes) -> Front:
        record = self._folder.fronts().get(hello.presence) or FrontRecord(pid=hello.pid, started=0)
        watch = ExitWatch(record.pid, record.started)
        front = Front(self._next_number, hello.presence, address, watch, time.monotonic())
        self._next_number += 1
        self._by_name[front.name] = front
        self._by_number[front.number] = front
        return front

    def remove(self, front: Front) -> None:
        self._by_name.pop(front.name, None)
        self._by_number.pop(front.number, None)
        front.watch.close()

    def gone(self) -> list[Front]:
        """Those whose process ended, or that signed off without saying goodbye."""
        signed_on = self._folder.fronts()
        return [front for front in self if front.name not in signed_on or front.watch.has_ended()]

    def newly_hung(self) -> list[Front]:
        """Those whose beat stopped since the last call."""
        hung = [front for front in self if not front.is_hung and time.monotonic() - front.last_beat > HUNG_AFTER_S]
        for front in hung:
            front.is_hung = True
        return hung

    def beat(self, front: Front) -> None:
        front.last_beat = time.monotonic()
        front.is_hung = False
