"""``mstar bench offline``: what it runs, counts and writes, on a model that runs in no time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from runtime.tiny import write_checkpoint
from torch.autograd import DeviceType
from typer.testing import CliRunner

from mstar.cli.bench import device_timeline, kernel_profile, offline_run
from mstar.cli.bench.device_timeline import DeviceTimeline, Replays
from mstar.cli.bench.engine_run import MESSAGE, run_workload
from mstar.cli.bench.measure import Bench
from mstar.cli.bench.offline_run import OfflineSettings
from mstar.cli.bench.text_table import text_table
from mstar.cli.bench.workloads import Sampling, Workload, equal_rows, w3
from mstar.cli.main import app
from mstar.runtime.core import EngineCore
from mstar.runtime.options import EngineOptions


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["bench", "offline", "--device", "cpu", "--threads", "1", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    return EngineCore(EngineOptions(model=str(folder), device="cpu", max_seq_len=256, max_running_requests=8))


def test_every_batch_size_is_measured_beside_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_run, "memory_bandwidth", lambda device: 1e9)
    model, file = write_checkpoint(tmp_path / "tiny"), tmp_path / "bench.json"
    sizes = ["--batch-sizes", "1,3", "--input-len", 8, "--output-len", 6, "--repeats", 1]
    table = run("--model", model, *sizes, "--compare", "transformers", "--json", file)
    for heading in ("tok/s", "ms/step", "floor ms", "% of floor", "GB/s", "peak MB", "ratio", "rows equal"):
        assert heading in table
    assert "gap" not in table, "a GPU's"
    record = json.loads(file.read_text())
    assert record["engine"]["dtype"] == "float32"
    assert [result["rows"] for result in record["results"]] == [1, 3]
    for result in record["results"]:
        # What a step reads: the weights, and keys and values (32 numbers each) of half the answer on average.
        moved = record["engine"]["weight_bytes"] + result["rows"] * (8 + 6 / 2) * 2 * 32 * 4
        assert result["floor_ms"] == pytest.approx(moved / 1e9 * 1e3)
        assert result["gb_per_s"] == pytest.approx(moved / result["step_ms"] / 1e6)
        (peer,) = result["peers"]
        assert peer["equal_tokens"] == 1.0
        assert peer["ratio"] == pytest.approx(result["tokens_per_s"] / peer["tokens_per_s"])
        assert result["step_ms"] > 0
        assert result["peak_mb"] > 0


def test_random_weights_need_a_config_alone_and_every_kind_of_run_is_told(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    (model / "model.safetensors").unlink()
    (model / "tokenizer.json").unlink()
    sizes = ["--batch-sizes", "2", "--input-len", 8, "--output-len", 4, "--repeats", 1]
    sampling = ["--temperature", 0.6, "--top-p", 0.9, "--top-k", 5]
    text = run("--model", model, "--load-format", "dummy", *sizes, *sampling, "--ttft", "9,17")
    assert "temperature 0.6, top-p 0.9, top-k 5" in text
    assert "first token of 9: median" in text
    assert "first token of 17: median" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workload", "w4"], "--workload"),
        (["--compare", "nobody"], "--compare"),
        (["--batch-sizes", "1,x"], "--batch-sizes"),
        (["--ttft", "0"], "--ttft"),
        (["--json", "/no/such/folder/x.json"], "--json"),
        (["--profile", "/no/such/folder/x.json"], "--profile"),
    ],
)
def test_what_makes_no_sense_is_refused_by_option(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["bench", "offline", *arguments])
    assert result.exit_code == 2
    assert named in result.output


def test_the_measurements_need_no_command_line_library() -> None:
    code = "import sys, mstar.cli.bench.offline_run; sys.exit(bool({'typer', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_run_sorts_tokens_by_request_and_times_by_what_they_brought(core: EngineCore) -> None:
    prompts = equal_rows(3, 8, 1, core.model.vocab_size, seed=1).prompts
    uneven = run_workload(core, Workload(prompts, np.array([5, 9, 7])))
    assert [len(tokens) for tokens in uneven.tokens] == [5, 9, 7]
    alone = [run_workload(core, Workload([prompt], np.array([9]))).tokens[0] for prompt in prompts]
    for tokens, expected in zip(uneven.tokens, alone, strict=True):
        assert tokens.tolist() == expected[: len(tokens)].tolist()
    assert uneven.num_tokens == 21
    assert uneven.iterations.size == uneven.brought.size
    assert (uneven.brought[uneven.steady] == 3).all()
    assert uneven.steady.stop - uneven.steady.start == 4, "those in which all three had a further token"
    assert 0 < uneven.step_seconds < uneven.seconds
    assert uneven.first_seconds < uneven.seconds


def test_the_mixed_workload_is_the_same_every_time_and_spans_its_range() -> None:
    first, second = w3(1000), w3(1000)
    assert first.rows == 256
    assert [p.tolist() for p in first.prompts] == [p.tolist() for p in second.prompts]
    lengths = np.array([len(prompt) for prompt in first.prompts])
    for values in (lengths, first.output_lens):
        assert values.min() >= 100
        assert values.max() <= 1024
        assert 500 < values.mean() < 620
    assert first.sampling == Sampling(0.6)
    assert all(request.ignore_eos for request in first.requests())


def test_a_bench_measures_first_tokens_and_the_mixed_workload(core: EngineCore) -> None:
    bench = Bench(core, 1e9, None)
    first = bench.first_token(16, repeats=2)
    assert 0 < first.least_ms <= first.median_ms
    assert first.event_ms is None
    mixed = bench.w3(w3(core.model.vocab_size, requests=8, low=4, high=20), repeats=1)
    assert mixed.output_tokens == pytest.approx(mixed.tokens_per_s * mixed.seconds)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_seq_len": 129, "max_running_requests": 32, "max_batch_tokens": 32 * 64}),
        ({"workloads": ("w3",)}, {"max_seq_len": 2049, "max_running_requests": 256}),
        ({"first_token_lens": (5000,)}, {"max_seq_len": 5001, "max_batch_tokens": 5000}),
        ({"options": {"device": "cpu", "max_batch_tokens": "77"}}, {"max_batch_tokens": 77}),
    ],
)
def test_the_engine_has_room_for_all_that_is_measured(given, expected) -> None:
    options = OfflineSettings(**given).engine_options()
    assert {name: getattr(options, name) for name in expected} == expected
    assert options.prefix_cache is False


class Event:
    """A CUDA event on a clock that moves by one each time it is read."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now += 1.0
        self.at = Event.now

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_a_timeline_pairs_the_ends_of_staging_with_those_of_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_timeline.torch.cuda, "Event", Event)
    monkeypatch.setattr(device_timeline.torch.cuda, "synchronize", lambda: None)
    timeline = DeviceTimeline()
    timeline.mark("stage")
    timeline.mark("replay")
    timeline.switch_on()
    for phases in (["replay"], ["stage", "replay"], ["stage", "replay", "stage", "replay"], ["stage", "replay"]):
        for name in ("preprocess", *phases, MESSAGE):  # the first is an eager step
            timeline.mark(name)
    replays = timeline.switch_off()
    assert replays.starts.tolist() == [0, 2, 4, 6]
    assert replays.ends.tolist() == [1, 3, 5, 7]
    assert replays.iterations.tolist() == [1, 2, 2, 3]
    assert replays.within(slice(2, 3)).starts.tolist() == [2, 4]
    timeline.switch_on()
    assert timeline.switch_off().starts.size == 0


def test_replays_tell_the_step_the_replay_and_the_gap() -> None:
    replays = Replays(np.array([0.0, 2.0, 5.0]), np.array([1.5, 4.0, 6.5]), np.arange(3))
    assert (replays.step_ms, replays.replay_ms, replays.gap_us) == (2.5, 1.5, 750.0)
    assert np.isnan(Replays(np.empty(0), np.empty(0), np.empty(0)).gap_us)


def test_a_profile_counts_what_ran_on_the_device_by_name_and_step() -> None:
    def event(name: str, us: float, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(elapsed_us=lambda: us))

    events = [event("gemm", 4.0)] * 8 + [event("norm", 1.0)] * 16 + [event("Memcpy HtoD", 2.0)] * 2
    events += [event("aten::mm", 99.0, DeviceType.CPU)]
    profile = kernel_profile._summary(SimpleNamespace(events=lambda: events), steps=4)  # type: ignore[arg-type]
    assert [(use.name, use.per_step, use.us_per_step) for use in profile.kernels] == [("gemm", 2, 8), ("norm", 4, 4)]
    assert (profile.kernels_per_step, profile.copies_per_step, profile.busy_us) == (6, 0.5, 13)


def test_a_table_aligns_its_columns() -> None:
    assert text_table("t", ["a", "bbb"], [["10", "2"], ["1", "20"]]).splitlines() == [
        "t", " a  bbb", "-------", "10    2", " 1   20",
    ]  # fmt: skip
