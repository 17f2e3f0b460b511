"""NVIDIA's perf_analyzer against a server started for it: a table, and a check that both counted the same.

Run by ``make perf``; perf_analyzer and what it needs are fetched into ``.cache`` the first time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from local_server import ROOT, running_server
from perf_analyzer import fetch_perf_analyzer

MODEL = "smollm2"
INPUT = ROOT / "client_examples" / "perf_analyzer_input.json"
TIME_LIMIT_S = 900


@dataclass(frozen=True)
class Run:
    """What perf_analyzer saw at one concurrency; times in seconds."""

    requests: int
    tokens: int
    seconds: float
    first_response: list[float]
    between_responses: list[float]


def read_profile(path: Path) -> Run:
    """Sum up perf_analyzer's ``--profile-export-file`` of one concurrency."""
    (experiment,) = json.loads(path.read_text())["experiments"]
    requests = experiment["requests"]
    first, between, tokens = [], [], 0
    for request in requests:
        times = request["response_timestamps"]
        first.append((times[0] - request["timestamp"]) / 1e9)
        between.extend((later - earlier) / 1e9 for earlier, later in pairwise(times))
        tokens += sum(int(response["num_output_tokens"]) for response in request["response_outputs"])
    started = min(request["timestamp"] for request in requests)
    ended = max(request["response_timestamps"][-1] for request in requests)
    return Run(len(requests), tokens, (ended - started) / 1e9, first, between)


def server_counts(address: str) -> tuple[int, int]:
    """Requests the server has answered and failed since it started."""
    with urllib.request.urlopen(f"http://{address}/v2/models/{MODEL}/stats", timeout=10) as response:
        (stats,) = json.load(response)["model_stats"]
    return stats["inference_stats"]["success"]["count"], stats["inference_stats"]["fail"]["count"]


def measure(command: list[str], addresses: dict[str, str], concurrency: int, requests: int) -> Run:
    """One perf_analyzer run; exits if it fails, hangs, or counts other than the server does."""
    export = ROOT / ".cache" / f"perf-{concurrency}.json"
    export.unlink(missing_ok=True)
    before, _ = server_counts(addresses["http"])
    command = [*command, "-m", MODEL, "-u", addresses["grpc"], "-i", "grpc", "--async", "--streaming"]
    command += ["--input-data", str(INPUT), "--concurrency-range", str(concurrency)]
    command += ["--measurement-mode", "count_windows", "--measurement-request-count", str(requests)]
    command += ["--stability-percentage", "999", "--profile-export-file", str(export)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    if result.returncode != 0:
        sys.exit(f"perf_analyzer ended with exit code {result.returncode}:\n{result.stdout}{result.stderr}")
    run = read_profile(export)
    after, failed = server_counts(addresses["http"])
    # Requests in flight when the last window closes are answered, but not in perf_analyzer's count.
    if failed or not run.requests <= after - before <= run.requests + concurrency:
        sys.exit(
            f"concurrency {concurrency}: perf_analyzer counted {run.requests} requests, the server answered "
            f"{after - before} and failed {failed}"
        )
    return run


def percentile(values: list[float], share: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1] if len(values) > 1 else values[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,32", help="streams at once, by comma (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=0, help="requests per window (default: 4 + 1 per stream)")
    args = parser.parse_args()
    command = fetch_perf_analyzer(ROOT / ".cache" / "perf_analyzer")
    heading = f"{'streams':>7} {'requests':>8} {'req/s':>7} {'tok/s':>7} {'first ms p50':>12} {'p99':>7}"
    with running_server("perf-server") as addresses:
        print(heading + f" {'next ms p50':>11} {'p99':>7}", flush=True)
        for concurrency in map(int, args.concurrency.split(",")):
            run = measure(command, addresses, concurrency, args.requests or 4 + concurrency)
            first = [percentile(run.first_response, share) * 1e3 for share in (50, 99)]
            between = [percentile(run.between_responses or [0.0], share) * 1e3 for share in (50, 99)]
            print(
                f"{concurrency:7} {run.requests:8} {run.requests / run.seconds:7.2f} {run.tokens / run.seconds:7.1f} "
                f"{first[0]:12.0f} {first[1]:7.0f} {between[0]:11.1f} {between[1]:7.1f}",
                flush=True,
            )
    print("The server answered what perf_analyzer counted, without a failure.")


if __name__ == "__main__":
    main()
