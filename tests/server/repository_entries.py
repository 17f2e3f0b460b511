"""Repository entries that the tests serve."""

from __future__ import annotations

import shutil
from pathlib import Path

from mstar.serving.pbtxt import render_config

SHIPPED = Path(__file__).resolve().parents[2] / "model_repository" / "smollm2"


def write_echo_entry(repository: Path, instances: int = 1, **options: str) -> None:
    """A repository entry whose engine repeats the prompt."""
    version = repository / "echo" / "1"
    version.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("echo_engine.py"), version / "model.py")
    (repository / "echo" / "config.pbtxt").write_text(
        render_config({"model": "smollm2-135m", **options}, instances=instances)
    )


def write_model_entry(repository: Path, name: str, instances: int = 1, **options: str) -> None:
    """A repository entry of SmolLM2."""
    shutil.copytree(SHIPPED / "1", repository / name / "1", ignore=shutil.ignore_patterns("__pycache__"))
    config = render_config({"model": "smollm2-135m", "device": "auto", **options}, instances=instances)
    (repository / name / "config.pbtxt").write_text(config)
