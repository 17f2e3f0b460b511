"""The demo: start a server, ask it over gRPC and over HTTP with curl, stop it.  Run by ``make demo`` in ``.venv``."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

from local_server import ROOT, running_server

QUESTION = "What is the capital of France, and what is it known for?"


def show(command: list[str]) -> None:
    """Print a command as one would type it, run it, and end the demo if it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    if command[0] == "python":
        command = [sys.executable, *command[1:]]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code != 0:
        sys.exit(f"the command failed with exit code {code}")


def main() -> None:
    with running_server("demo-server") as addresses:
        show(["python", "client_examples/grpc_stream.py", "--url", addresses["grpc"], "--chat", QUESTION, "--stats"])
        messages = json.dumps([{"role": "user", "content": QUESTION}])
        body = json.dumps({"messages": messages, "stream": True, "temperature": 0, "max_tokens": 12})
        url = f"http://{addresses['http']}/v2/models/smollm2/generate_stream"
        show(["curl", "--silent", "--show-error", "--fail-with-body", "--no-buffer", url, "--data", body])
    print("\nThe server is stopped. `make serve` starts one that stays.")


if __name__ == "__main__":
    main()
