"""The few HTTP calls a launcher makes to its server."""

from __future__ import annotations

import http.client
import json
from typing import Any

TIMEOUT_S = 3.0


class ServerControl:
    """Health and repository of the server at ``host`` and ``port``; None or False stands for no answer."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    def is_ready(self) -> bool:
        """Whether the server is up and every model loaded."""
        return self._call("GET", "/v2/health/ready")[0] == http.HTTPStatus.OK

    def answers(self) -> bool:
        """Whether the server answers at all, whatever it says."""
        return self._call("GET", "/v2/health/live")[0] is not None

    def unload(self, model: str) -> bool:
        """Refuse new requests of a model and unload it once the open ones have ended; returns at once."""
        return self._call("POST", f"/v2/repository/models/{model}/unload", b"{}")[0] == http.HTTPStatus.OK

    def busy_models(self) -> list[str] | None:
        """Models that are loaded, loading or unloading; None if the server did not answer."""
        status, body = self._call("POST", "/v2/repository/index", b"{}")
        if status != http.HTTPStatus.OK:
            return None
        entries: list[dict[str, Any]] = json.loads(body)
        return sorted({entry["name"] for entry in entries if entry.get("state", "UNAVAILABLE") != "UNAVAILABLE"})

    def _call(self, method: str, path: str, body: bytes | None = None) -> tuple[int | None, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return None, b""
        finally:
            connection.close()
