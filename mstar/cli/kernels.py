"""``mstar kernels``: compile GPU kernels ahead, so that a server starts as fast the first time as ever after."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mstar.cli.assignments import parse_assignments
from mstar.cli.bench.text_table import text_table
from mstar.cli.errors import FAILED, InputError
from mstar.kernels.kernel_cache import CachedKernel, cache_folder, cached_kernels
from mstar.runtime.options import parse_options
from mstar.utils.errors import MstarError

if TYPE_CHECKING:
    from mstar.runtime.options import EngineOptions

ARCH = re.compile(r"(\d{1,2})\.(\d)([af]?)")
CACHE_HELP = "Triton's cache. Default: TRITON_CACHE_DIR, else ~/.triton/cache. It holds absolute paths: do not move it."


def build(
    arch: Annotated[str, typer.Option(help="compute capability of the GPU, such as 9.0a for an H100 or H200")],
    model: Annotated[
        str, typer.Option(help="folder (config.json is enough), .gguf file, Hugging Face id or alias")
    ] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32, as the engine will have it")] = "auto",
    option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of an engine option, the same as of the server; repeat for several."),
    ] = None,
    flashinfer: Annotated[
        bool, typer.Option("--flashinfer", help="also build FlashInfer's modules for this model: minutes, with nvcc")
    ] = False,
    cache_dir: Annotated[Path | None, typer.Option(help=CACHE_HELP)] = None,
    triton_key: Annotated[
        Path | None,
        typer.Option(
            help="File with what triton.runtime.cache.triton_key() returns where the kernels will run, if that is not "
            "this installation of Triton; the version must be the same."
        ),
    ] = None,
) -> None:
    """Compile the kernels that a server of these options and this environment runs; no GPU is needed.

    Their places in the cache depend on Triton's installation: build inside the image that will run them.
    """
    capability = _capability(arch)
    options = parse_options({"model": model, "dtype": dtype} | parse_assignments(option or []))[0]
    if cache_dir is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache_dir.resolve())
    try:
        from mstar.kernels.cuda.ahead import standing_in_for
        from mstar.runtime.kernel_build import build_kernels
    except ImportError as error:
        raise MstarError(
            f"kernels cannot be built without Triton (pip install 'mstar-triton[cuda]'): {error}"
        ) from None
    if triton_key is not None and not triton_key.is_file():
        raise InputError(f"--triton-key: no such file: {triton_key}")
    with standing_in_for(None if triton_key is None else triton_key.read_text().strip()):
        built = build_kernels(options, capability)
    found = sum(kernel.was_cached for kernel in built.kernels)
    print(f"{cache_folder()}: {len(built.kernels)} kernels, {len(built.kernels) - found} of them new")
    if flashinfer:
        _build_flashinfer(options, arch)
    if built.dropped:
        print(f"some steps could not be carried out without a GPU, their kernels are missing: {built.dropped}")
        raise typer.Exit(FAILED)


def list_kernels(cache_dir: Annotated[Path | None, typer.Option(help=CACHE_HELP)] = None) -> None:
    """List our kernels in Triton's cache, with what each takes of a multiprocessor."""
    folder = cache_dir or cache_folder()
    print(text_table(str(folder), ("kernel", "arch", "warps", "stages", "registers", "spilled B", "shared B", "key"),
                     [_cells(kernel) for kernel in cached_kernels(folder)]))  # fmt: skip


def _cells(kernel: CachedKernel) -> list[str]:
    usage = ("-" if value is None else str(value) for value in (kernel.registers, kernel.spilled_bytes))
    counts = str(kernel.arch), str(kernel.num_warps), str(kernel.num_stages)
    return [kernel.name, *counts, *usage, str(kernel.shared_bytes), kernel.key[:8]]


def _capability(arch: str) -> int:
    found = ARCH.fullmatch(arch)
    if found is None:
        raise typer.BadParameter(f"a compute capability such as 9.0a, got {arch!r}", param_hint="--arch")
    return 10 * int(found[1]) + int(found[2])


def _build_flashinfer(options: EngineOptions, arch: str) -> None:
    if shutil.which("nvcc") is None:
        raise MstarError("--flashinfer: FlashInfer's modules need nvcc, which is not on PATH")
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch  # read as FlashInfer is imported
    from mstar.runtime.kernel_build import flashinfer_modules

    try:
        modules = flashinfer_modules(options, _capability(arch))
    except ImportError as error:
        raise MstarError(f"--flashinfer: FlashInfer does not import (extra 'cuda'): {error}") from None
    for module in modules:
        if not module.is_compiled:
            module.build(verbose=False)
        print(f"built {module.name}")
