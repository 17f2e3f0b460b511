"""``make perf`` believes perf_analyzer only where the server counted the same."""

from __future__ import annotations

import importlib
import json
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = {"http": "127.0.0.1:1", "grpc": "127.0.0.1:2"}


@pytest.fixture
def perf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "build")
    module = importlib.import_module("perf")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / ".cache").mkdir()
    return module


def profile(requests: int) -> str:
    """An export of requests with two responses, of one token and of two; times in nanoseconds."""
    made = [
        {
            "timestamp": start * 10**9,
            "response_timestamps": [(start + 2) * 10**9, (start + 3) * 10**9],
            "response_outputs": [{"num_output_tokens": "1"}, {"num_output_tokens": "2"}],
        }
        for start in range(requests)
    ]
    return json.dumps({"experiments": [{"requests": made}]})


def fake_analyzer(folder: Path, requests: int, code: int = 0) -> list[str]:
    """A command that leaves an export where perf_analyzer would, and the arguments it was given."""
    script = folder / "analyzer"
    script.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\nlast = sys.argv[-1]\n"
        f"pathlib.Path(last).write_text({profile(requests)!r})\n"
        f"pathlib.Path({str(folder / 'arguments')!r}).write_text(' '.join(sys.argv))\nsys.exit({code})\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return [str(script)]


def test_an_export_is_summed_up(perf: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "export.json").write_text(profile(3))
    assert perf.read_profile(tmp_path / "export.json") == perf.Run(3, 9, 5.0, [2.0] * 3, [1.0] * 3)


@pytest.mark.parametrize(
    ("answered", "failed", "is_fine"), [(10, 0, True), (14, 0, True), (9, 0, False), (15, 0, False), (10, 1, False)]
)
def test_counts_must_agree_up_to_what_was_in_flight(
    answered: int, failed: int, is_fine: bool, perf: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([(100, 0), (100 + answered, failed)])
    monkeypatch.setattr(perf, "server_counts", lambda address: next(counts))
    command = fake_analyzer(tmp_path, requests=10)
    if is_fine:
        assert perf.measure(command, ADDRESSES, 4, 8).requests == 10
        asked = (tmp_path / "arguments").read_text()
        for words in ("-i grpc --async --streaming", "--concurrency-range 4", "--input-data"):
            assert words in asked
    else:
        with pytest.raises(SystemExit, match="perf_analyzer counted 10 requests"):
            perf.measure(command, ADDRESSES, 4, 8)


def test_a_failing_analyzer_is_shown(perf: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf, "server_counts", lambda address: (0, 0))
    with pytest.raises(SystemExit, match="exit code 3"):
        perf.measure(fake_analyzer(tmp_path, 1, code=3), ADDRESSES, 1, 1)
