"""Imports point down the list of packages, and stand where a reader looks for them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mstar

ROOT = Path(mstar.__file__).parent
# From top to bottom: a package imports those below it.
ORDER = [
    "cli",
    "serving",
    "llm",
    "simulate",
    "runtime",
    "conductor",
    "model",
    "text",
    "graph",
    "engine",
    "kernels",
    "utils",
]
FILES = sorted(ROOT.rglob("*.py"))
# Imports within functions, each by its reason; besides those of GPU_ONLY.
GPU_ONLY = ("mstar.kernels.cuda.", "flashinfer")  # an install for the CPU has neither Triton nor FlashInfer
LAZY = {
    ("__init__.py", "mstar"): "`import mstar` is free",
    **{
        (f"engine/resources/{name}/config.py", f"mstar.engine.resources.{name}.manager"): "declarations load no kernels"
        for name in ("attention", "grammar", "kv", "logit_edits", "logprobs", "positions", "sampler")
    },
    ("runtime/engine_process.py", "mstar.runtime.core"): "torch's failure to load reaches the client",
    ("runtime/engine_process.py", "mstar.runtime.engine_server"): "torch's failure to load reaches the client",
    ("runtime/engine_process.py", "mstar.runtime.rehearsal"): "torch's failure to load reaches the client",
    ("runtime/drivers.py", "mstar.runtime.core"): "a child's parent needs no torch",
    ("model/locate.py", "huggingface_hub"): "slow, and most names do not need it",
    ("engine/resources/attention/backends.py", "mstar.engine.resources.attention.flashinfer_backend"): "optional",
    ("engine/resources/logit_edits/manager.py", "mstar.engine.resources.logit_edits.device"): "needs Triton",
    ("engine/resources/logprobs/manager.py", "mstar.engine.resources.logprobs.device"): "needs Triton",
    ("engine/resources/sampler/history.py", "mstar.engine.resources.sampler.device_history_rows"): "needs Triton",
    ("model/loader.py", "mstar.model.layers.fused"): "needs Triton",
    ("cli/bench/peer.py", "transformers"): "optional",
    ("cli/bench/peer.py", "vllm"): "optional",
    ("cli/bench/serve.py", "tritonclient.grpc.aio"): "optional",
    ("cli/kernels.py", "mstar.runtime.kernel_build"): "needs Triton, which a CPU install lacks",
    ("cli/bench/serve.py", "matplotlib"): "optional",
    ("cli/simulate.py", "matplotlib"): "optional",
}
TORCH_FREE = [
    "mstar.serving.backend",
    "mstar.serving.launcher",
    "mstar.runtime.client",
    "mstar.runtime.messages",
    "mstar.runtime.options",
    "mstar.runtime.params",
    "mstar.runtime.prepare",
    "mstar.runtime.presence",
    "mstar.runtime.board",
    "mstar.conductor.request",
    "mstar.model.front",
    "mstar.text.tokenizer",
    "mstar.graph.walk",
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports anywhere; ``from mstar import x`` counts as ``mstar.x``."""
    for node in ast.walk(ast.parse(path.read_text())):
        for module in imported(node):
            if isinstance(node, ast.ImportFrom) and module == "mstar":
                yield from (f"mstar.{alias.name}" for alias in node.names)
            else:
                yield module


def test_every_package_has_its_place():
    assert {package_of(path) for path in FILES} - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("package", ORDER)
def test_a_package_imports_only_those_below_it(package):
    allowed = {package, *ORDER[ORDER.index(package) :]}
    upward = [
        f"{name_of(path)} imports {module}"
        for path in FILES
        if package_of(path) == package
        for module in imports(path)
        if module.startswith("mstar.") and module.split(".")[1] in set(ORDER) - allowed
    ]
    assert not upward


def test_no_function_imports_but_for_a_stated_reason():
    found = {
        (name_of(path), module.removesuffix(".pyplot"))
        for path in FILES
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        for module in imported(node)
        if not module.startswith(GPU_ONLY)
    }
    assert found == set(LAZY)


def test_front_ends_load_no_torch(tmp_path):
    (tmp_path / "triton_python_backend_utils.py").write_text("TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1\n")
    code = (
        f"import importlib, sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        f"for name in {TORCH_FREE}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'llvmlite', 'flashinfer', 'triton'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{name} imports {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
