"""Find a ``tritonserver`` and prepare what it needs to run our Python-backend models."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mstar.utils.errors import LoadError

IMAGE_BINARY = Path("/opt/tritonserver/bin/tritonserver")
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
OWNED_FLAGS = frozenset(
    {
        "model-repository",
        "model-store",
        "backend-directory",
        "allow-http",
        "http-address",
        "http-port",
        "grpc-address",
        "grpc-port",
        "metrics-address",
        "metrics-port",
    }
)


@dataclass(frozen=True)
class ServerInstall:
    """A tritonserver found on this machine.

    ``wheel_root`` is the ``pytriton/tritonserver`` folder of the nvidia-pytriton wheel, or None for a full
    installation that brings its own backend folder.
    """

    binary: Path
    wheel_root: Path | None = None


@dataclass(frozen=True)
class ServerOptions:
    """What one run of the server is started with; ports are real ones by now (0 was replaced)."""

    repository: Path
    models: tuple[str, ...]
    http_port: int
    grpc_port: int
    metrics_port: int
    address: str = "0.0.0.0"
    exit_timeout_s: int = 60
    shm_prefix: str = "mstar_"
    log_info: bool = True


def find_server(binary: Path | None = None) -> ServerInstall:
    """The server to run: ``binary`` if given, else on PATH, in ``/opt/tritonserver``, in the nvidia-pytriton wheel.

    Raises:
        LoadError: there is none; the message lists the places and the command that installs one.
    """
    if binary is not None:
        if not os.access(binary, os.X_OK) or binary.is_dir():
            raise LoadError(f"tritonserver: {binary} is not an executable file")
        return ServerInstall(binary.resolve())
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return ServerInstall(Path(on_path).resolve())
    if os.access(IMAGE_BINARY, os.X_OK):
        return ServerInstall(IMAGE_BINARY)
    wheel = find_wheel()
    if wheel is not None:
        return ServerInstall(wheel / "bin" / "tritonserver", wheel_root=wheel)
    raise LoadError(
        f"tritonserver: not found on PATH, at {IMAGE_BINARY}, or in the nvidia-pytriton wheel of {sys.prefix}; "
        'install one with: python3 -m pip install "nvidia-pytriton>=0.7.0" "numpy<2"'
    )


def find_wheel() -> Path | None:
    """``pytriton/tritonserver`` of the installed wheel, found without importing pytriton."""
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        root = Path(location) / "tritonserver"
        if (root / "bin" / "tritonserver").is_file():
            return root
    return None


def prepare_backend(install: ServerInstall, work_dir: Path) -> Path | None:
    """Lay out the wheel's Python backend with the stub of this Python in ``work_dir``; None for other installs.

    Returns: the folder to pass as ``--backend-directory``.
    Raises:
        LoadError: numpy 2 is installed (this stub cannot read its arrays), or the wheel has no stub for this Python.
    """
    if install.wheel_root is None:
        return None
    check_numpy()
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = install.wheel_root / "python_backend_stubs" / minor / "triton_python_backend_stub"
    if not stub.is_file():
        found = ", ".join(sorted(p.name for p in stub.parent.parent.glob("3.*")))
        raise LoadError(f"tritonserver: the nvidia-pytriton wheel has no stub for Python {minor}, only for {found}")
    source = install.wheel_root / "backends" / "python"
    target = work_dir / "backends" / "python"
    target.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (target / name).symlink_to(source / name)
    if os.access(stub, os.X_OK):
        (target / stub.name).symlink_to(stub)
    else:
        shutil.copyfile(stub, target / stub.name)
        (target / stub.name).chmod(0o755)
    return target.parent


def check_numpy() -> None:
    """Raises LoadError under numpy 2: with the wheel's stub, string inputs arrive as garbage and the stub dies."""
    try:
        found = version("numpy")
    except PackageNotFoundError:
        raise LoadError('numpy: not installed; install it with: python3 -m pip install "numpy>=1.26,<2"') from None
    if int(found.split(".")[0]) >= 2:
        raise LoadError(
            f"numpy: the tritonserver of the nvidia-pytriton wheel needs numpy < 2, got {found}; "
            'install it with: python3 -m pip install "numpy>=1.26,<2"'
        )


def python_library_dir() -> Path | None:
    """The folder that holds this interpreter's shared library (``libpython3.x.so``), which the stub links to."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    if ".so" not in name:  # a statically linked interpreter, as Debian's: its library has the usual name
        name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    libdir = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    for folder in (libdir, libdir / multiarch, Path(sys.base_prefix) / "lib", Path("/usr/lib") / multiarch):
        if (folder / name).exists():
            return folder
    return None


def server_environment(install: ServerInstall, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of the server: ``python3`` on PATH is this interpreter, and its packages and ours are importable.

    The wheel's stub runs an isolated interpreter: it ignores ``PYTHONPATH`` and sees the site-packages of ``python3``
    on PATH, and what ``.pth`` files there add.  ``MSTAR_PYTHON`` tells the engine process which interpreter to use.
    ``base`` defaults to ``os.environ``.

    Raises:
        LoadError: the wheel's stub needs this interpreter's shared library and it is not installed.
    """
    env = dict(os.environ if base is None else base)
    package_root = str(Path(__file__).resolve().parents[2])
    site_packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    env["MSTAR_PYTHON"] = sys.executable
    env["PATH"] = join_paths([str(Path(sys.executable).parent)], env.get("PATH", os.defpath))
    env["PYTHONPATH"] = join_paths([package_root, *site_packages], env.get("PYTHONPATH", ""))
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("TOKENIZERS_PARALLELISM", "false")  # prompts come one at a time: its threads have nothing to share
    if install.wheel_root is not None:
        library_dir = python_library_dir()
        if library_dir is None:
            minor = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise LoadError(
                f"libpython{minor}.so: the shared library of {sys.executable} is not installed, and the server's "
                f"Python stub links to it; install it with: sudo apt-get install libpython{minor}"
            )
        wheel_libs = install.wheel_root.parents[1] / "nvidia_pytriton.libs"
        env["LD_LIBRARY_PATH"] = join_paths([str(wheel_libs), str(library_dir)], env.get("LD_LIBRARY_PATH", ""))
    return env


def join_paths(first: Sequence[str], rest: str) -> str:
    """A search path of ``first`` then the entries of ``rest``, without repeats and empty entries."""
    entries = [*first, *rest.split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(entry for entry in entries if entry))


def server_arguments(
    options: ServerOptions, backend_directory: Path | None = None, extra: Sequence[str] = ()
) -> list[str]:
    """Command-line arguments of tritonserver; a flag in ``extra`` replaces our default of the same name.

    Raises:
        LoadError: ``extra`` sets a flag that the launcher must know, such as a port.
    """
    extra = join_flag_values(extra)
    for argument in extra:
        if flag_name(argument) in OWNED_FLAGS:
            raise LoadError(f"--{flag_name(argument)}: set it with an option of `mstar serve`, not as a server flag")
    defaults = [
        f"--model-repository={options.repository}",
        f"--http-address={options.address}",
        f"--http-port={options.http_port}",
        f"--grpc-address={options.address}",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-address={options.address}",
        f"--metrics-port={options.metrics_port}",
        "--model-control-mode=explicit",
        f"--exit-timeout-secs={options.exit_timeout_s}",
        "--metrics-config=histogram_latencies=true",
        "--backend-config=python,shm-default-byte-size=67108864",
        "--backend-config=python,thread-pool-size=64",
        "--backend-config=python,stub-timeout-seconds=120",
        f"--backend-config=python,shm-region-prefix-name={options.shm_prefix}",
        f"--log-info={str(options.log_info).lower()}",
    ]
    if not any(device.exists() for device in GPU_DEVICES):
        defaults.append("--allow-gpu-metrics=false")  # else it reports two errors
    if backend_directory is not None:
        defaults.append(f"--backend-directory={backend_directory}")
    if "model-control-mode" not in {flag_name(argument) for argument in extra}:
        defaults.extend(f"--load-model={name}" for name in options.models)
    replaced = {flag_key(argument) for argument in extra}
    return [argument for argument in defaults if flag_key(argument) not in replaced] + extra


def join_flag_values(arguments: Sequence[str]) -> list[str]:
    """``["--flag", "value"]`` as ``["--flag=value"]``; arguments that already carry their value stay as they are."""
    joined: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            joined.append(argument)
        elif joined and "=" not in joined[-1]:
            joined[-1] += f"={argument}"
        else:
            raise LoadError(f"{argument}: a server flag starts with --")
    return joined


def flag_name(argument: str) -> str:
    """``backend-config`` of ``--backend-config=python,thread-pool-size=64``."""
    return argument.removeprefix("--").partition("=")[0]


def flag_key(argument: str) -> str:
    """What makes two arguments the same setting: the flag, and for flags of many settings the setting too."""
    name, _, value = argument.removeprefix("--").partition("=")
    if name in ("backend-config", "metrics-config"):
        return f"{name}={value.rpartition('=')[0]}"
    if name == "load-model":
        return argument
    return name


_PYTHON_BACKEND = re.compile(r'^\s*backend\s*:\s*"python"', re.MULTILINE)


def find_models(repository: Path) -> tuple[str, ...]:
    """Names of the model folders (those with a ``config.pbtxt``) of a repository, sorted.

    Raises:
        LoadError: the folder does not exist or holds no model, or a Python model lacks its ``model.py`` (the server
            would log it and wait).
    """
    if not repository.is_dir():
        raise LoadError(f"--repository: {repository} is not a folder")
    names = tuple(sorted(path.parent.name for path in repository.glob("*/config.pbtxt")))
    if not names:
        raise LoadError(f"--repository: {repository} has no model (a folder with a config.pbtxt)")
    for name in names:
        is_python = _PYTHON_BACKEND.search((repository / name / "config.pbtxt").read_text(errors="replace"))
        if is_python and not any(repository.glob(f"{name}/[1-9]*/model.py")):
            raise LoadError(
                f"--repository: {repository / name} has no version folder with a model.py, such as 1/model.py"
            )
    return names
