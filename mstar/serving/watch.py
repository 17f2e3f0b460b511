"""What a launcher sees of the engines and stubs of its server, through the files they keep (``runtime.presence``)."""

from __future__ import annotations

import shutil

from mstar.runtime.presence import EngineFolder, crashed, engine_folders, server_folder

LOG_BYTES = 65536


class Presence:
    """The engines and stubs of one running server; made while the server lives."""

    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid
        self._folder = server_folder(server_pid)

    def lost(self) -> list[str]:
        """Engines and stubs that are gone without having signed off, each in a few words."""
        return crashed(self._server_pid)

    def has_live_stubs(self) -> bool:
        """Whether a stub that has not signed off still runs."""
        return any(folder.has_living_fronts() for folder in self._folders())

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

    def _folders(self) -> list[EngineFolder]:
        return engine_folders(self._server_pid)


def read_end(folder: EngineFolder) -> list[str]:
    """The last lines of an engine's log; empty if there is none."""
    try:
        with folder.log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
