"""Fetch NVIDIA's perf_analyzer into a folder, with newer system libraries of its own where those here are too old."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VERSION = "2.60.0"
# The published binary is linked against glibc 2.38: Ubuntu 24.04 and Debian 13 have it, Debian 12 does not.
PLATFORM = "manylinux_2_38_x86_64"
SUITE = "trixie"
PACKAGES = ("libc6", "libstdc++6", "libgcc-s1", "libssl3t64", "zlib1g", "libzstd1")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
LIBRARIES = "usr/lib/x86_64-linux-gnu"


def fetch_perf_analyzer(folder: Path) -> list[str]:
    """The command that runs perf_analyzer, fetched into ``folder`` on the first call.

    Raises:
        SystemExit: it cannot be fetched, or it does not run here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    binary = folder / "wheel" / "perf_analyzer" / "bin" / "perf_analyzer"
    if not binary.exists():
        fetch_binary(binary)
    plain = [str(binary)]
    if runs(plain):
        return plain
    root = folder / SUITE
    with_loader = [str(root / "usr/lib64/ld-linux-x86-64.so.2"), "--library-path", str(root / LIBRARIES), str(binary)]
    if not Path(with_loader[0]).exists():
        fetch_libraries(folder, root)
    if not runs(with_loader):
        sys.exit(f"perf_analyzer: {binary} does not run here; it needs glibc 2.38 (Debian 13, Ubuntu 24.04)")
    return with_loader


def fetch_binary(binary: Path) -> None:
    print(f"Fetching perf_analyzer {VERSION}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    target = ["--only-binary=:all:", f"--platform={PLATFORM}", f"--target={binary.parents[2]}", "--upgrade"]
    run([*pip, *target, f"perf-analyzer=={VERSION}"])
    binary.chmod(0o755)


def fetch_libraries(folder: Path, root: Path) -> None:
    """Unpack Debian 13's loader and libraries into ``root``; nothing of the system is touched."""
    print(f"Fetching the libraries it needs from Debian {SUITE}", flush=True)
    if not KEYRING.exists():
        sys.exit(f"perf_analyzer: needs glibc 2.38 (Debian 13, Ubuntu 24.04), and {KEYRING} to fetch it is missing")
    apt = folder / "apt"
    for name in ("lists/partial", "archives/partial", "debs"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "status").write_text("")
    (apt / "sources.list").write_text(f"deb [signed-by={KEYRING}] http://deb.debian.org/debian {SUITE} main\n")
    settings = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": apt,
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt,
        "Dir::Cache::archives": apt / "archives",
        "APT::Sandbox::User": "",
    }
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    run([*command, "update"])
    run([*command, "download", *PACKAGES], cwd=apt / "debs")
    for package in sorted((apt / "debs").glob("*.deb")):
        run(["dpkg-deb", "-x", str(package), str(root)])


def runs(command: list[str]) -> bool:
    result = subprocess.run([*command, "--version"], capture_output=True, check=False)
    return b"Perf Analyzer Version" in result.stdout + result.stderr  # exits with 1, and does not know its own number


def run(command: list[str], cwd: Path | None = None) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"perf_analyzer: {' '.join(command[:2])} failed:\n{result.stdout}{result.stderr}")
