"""What the reference makes of the golden prompts, and how to ask a server that serves the model for it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from serving_client import ServerProcess

from mstar.runtime.board import Board
from mstar.runtime.presence import engine_folders

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "smollm2_135m_greedy.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
MODEL = "smollm2"


def prompt_of(case: dict[str, Any]) -> dict[str, str]:
    if case["kind"] == "chat":
        return {"messages": json.dumps(case["messages"])}
    return {"text_input": case["prompt"]}


def greedy(case: dict[str, Any], max_tokens: int = 48, **options: Any) -> dict[str, Any]:
    values = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, "return_token_ids": True}
    return {**prompt_of(case), **values, "skip_special_tokens": False, **options}


def certain(case: dict[str, Any], length: int = 48) -> int:
    """How many of the first ``length`` tokens the reference is sure of."""
    return min([length, *case["tie_steps"]])


def assert_golden(case: dict[str, Any], token_ids: list[int], length: int = 48) -> None:
    sure = certain(case, length)
    assert len(token_ids) == length
    assert token_ids[:sure] == case["output_ids"][:sure]


def board(server: ServerProcess) -> Board:
    (folder,) = engine_folders(server.pid)
    return Board.open(folder.board_path)


def wait_idle(server: ServerProcess, timeout_s: float = 10) -> float:
    """Seconds until no row runs and none waits."""
    counters = board(server)
    started = time.monotonic()
    while counters.running or counters.queued:
        assert time.monotonic() - started < timeout_s, f"{counters.running} running, {counters.queued} queued"
        time.sleep(0.002)
    return time.monotonic() - started
