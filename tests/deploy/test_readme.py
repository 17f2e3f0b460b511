"""The README and the documents it leads to say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mstar.runtime.options import OPTIONS
from mstar.serving.contract import INPUTS, OUTPUTS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("tensor", [*INPUTS, *OUTPUTS], ids=lambda tensor: tensor.name)
def test_tensor_stands_in_its_table_with_type_and_shape(tensor) -> None:
    assert f"| `{tensor.name}` | {tensor.dtype} [{tensor.dims[0]}] |" in README


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_option_stands_in_a_table(option) -> None:
    assert re.search(rf"^\|[^|]*`{option.name}`", README, re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_local_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if "://" not in link:
            assert (document.parent / link).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_and_functions_exist(document: Path) -> None:
    text = document.read_text()
    for name in re.findall(r"`((?:serving|runtime|conductor|engine|text)/\w+\.py)`", text):
        assert (ROOT / "mstar" / name).exists(), name
    for owner, method in re.findall(r"`(\w+)\.(\w+)`", text):
        if owner[0].isupper():
            source = "\n".join(path.read_text() for path in (ROOT / "mstar").rglob("*.py"))
            assert re.search(rf"class {owner}\b", source), owner
            assert re.search(rf"def {method}\b", source), method


def test_make_targets_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_python_example_is_valid() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    compile(example, "README.md", "exec")
