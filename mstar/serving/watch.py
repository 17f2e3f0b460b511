"""What a launcher sees of the engines and stubs of its server, through the files they keep (``runtime.presence``)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from mstar.runtime.board import Board, EngineState, Slot, StaleCheck
from mstar.runtime.client import BEAT_STALE_S
from mstar.runtime.presence import EngineFolder, EngineRecord, crashed, engine_folders, server_folder

LOG_BYTES = 65536


class Presence:
    """The engines and stubs of one running server; made while the server lives."""

    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid
        self._folder = server_folder(server_pid)
        self._beats: dict[Path, tuple[Board, StaleCheck]] = {}

    def lost(self) -> list[str]:
        """Engines and stubs that are gone without having signed off or do not move, each in a few words."""
        silent = f"no beat for {BEAT_STALE_S:g} s"
        return crashed(self._server_pid) + [
            f"engine {engine.name} (pid {engine.pid}), {silent}" for engine in self._stale_engines()
        ]

    def kill_stale_engines(self) -> None:
        """Ends engines that do not move: nothing they are told reaches them."""
        for engine in self._stale_engines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGKILL)

    def _stale_engines(self) -> list[EngineRecord]:
        stale = []
        for folder in self._folders():
            engine = folder.engine()
            watched = self._beats.pop(folder.path, None) or _open_board(folder)
            if engine is None or not engine.is_alive() or watched is None:
                continue
            board, check = watched
            # An engine that loads has no beat yet; and its folder has the board of the one before it at first.
            if board.state in (EngineState.READY, EngineState.DRAINING):
                self._beats[folder.path] = watched
                if check.is_stale(board[Slot.BEAT_NS]):
                    stale.append(engine)
        return stale

    def has_live_stubs(self) -> bool:
        """Whether a stub that has not signed off still runs."""
        return any(folder.has_living_fronts() for folder in self._folders())

    def has_live_engines(self) -> bool:
        return any(self._live_engines())

    def drain_engines(self) -> bool:
        """Tells every engine to take no more requests, end those it has, and leave; whether there is any."""
        engines = list(self._live_engines())
        for engine in engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGTERM)
        return bool(engines)

    def crash_logs(self, lines: int = 20) -> dict[str, list[str]]:
        """The last lines that each crashed engine wrote, by engine name; engines without output are left out."""
        logs = {}
        for folder in self._folders():
            engine = folder.engine()
            if engine is not None and not engine.has_signed_off and not engine.is_alive():
                end = read_end(folder)[-lines:]
                if end:
                    logs[engine.name] = end
        return logs

    def remove(self) -> None:
        """Remove the files, once the server and all it started are gone."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _live_engines(self) -> Iterator[EngineRecord]:
        engines = (folder.engine() for folder in self._folders())
        return (engine for engine in engines if engine is not None and engine.is_alive())

    def _folders(self) -> list[EngineFolder]:
        return engine_folders(self._server_pid)


def _open_board(folder: EngineFolder) -> tuple[Board, StaleCheck] | None:
    try:
        return Board.open(folder.board_path), StaleCheck(BEAT_STALE_S)
    except OSError:  # its engine has just been started
        return None


def read_end(folder: EngineFolder) -> list[str]:
    """The last lines of an engine's log; empty if there is none."""
    try:
        with folder.log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
