"""The README and the documents it leads to say what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from mstar.cli.main import app
from mstar.runtime.options import OPTIONS
from mstar.runtime.params import coerce_parameters
from mstar.runtime.spellings import IGNORED, NEUTRAL, UNSUPPORTED
from mstar.serving.contract import INPUTS, OUTPUTS
from mstar.utils.knobs import KNOBS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ENVIRONMENT = (ROOT / "docs" / "environment.md").read_text()
COMMANDS = set(typer.main.get_command(app).commands)
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("tensor", [*INPUTS, *OUTPUTS], ids=lambda tensor: tensor.name)
def test_tensor_stands_in_its_table_with_type_and_shape(tensor) -> None:
    assert f"| `{tensor.name}` | {tensor.dtype} [{tensor.dims[0]}] |" in README


def rows_of(heading: str) -> list[list[str]]:
    """The cells of every table row below ``| heading |``, to the end of that table."""
    tables = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert tables, heading
    return [
        [cell.strip() for cell in line.strip("|\n").split(" | ")] for table in tables for line in table.splitlines()
    ]


@pytest.mark.parametrize(("heading", "tensors"), [("input", INPUTS), ("output", OUTPUTS)])
def test_a_table_names_the_tensors_there_are_in_their_order(heading: str, tensors: Any) -> None:
    assert [row[0].strip("`") for row in rows_of(heading)] == [tensor.name for tensor in tensors]


def test_the_option_tables_name_the_options_there_are_with_their_defaults() -> None:
    shown: dict[str, str] = {}
    for names, default, *_ in rows_of("option"):
        found = re.findall(r"`(\w+)`", names)
        defaults = default.strip("`").split(", ")
        shown |= dict(zip(found, defaults * len(found) if len(defaults) == 1 else defaults, strict=False))
    assert set(shown) == {option.name for option in OPTIONS}
    for option in OPTIONS:
        if option.default not in (None, ()):
            allowed = {str(option.default), str(option.default).removesuffix(".0"), str(option.default).lower()}
            assert shown[option.name] in allowed, option.name


def test_the_page_of_environment_variables_lists_what_the_project_reads() -> None:
    rows = re.findall(r"^\| `(MSTAR_\w+)` \| (\S+) \| (.*?) \| (.*?) \|$", ENVIRONMENT, re.MULTILINE)
    assert [row[0] for row in rows] == list(KNOBS)
    for name, default, values, effect in rows:
        knob = KNOBS[name]
        shown = int(knob.default) if isinstance(knob.default, bool) else knob.default
        assert default == ("unset" if shown is None else str(shown)), name
        assert effect == knob.doc
        for bound in (*knob.choices, knob.low, knob.high):
            assert bound is None or str(bound) in values, name


def guide(kind: str, text: str | None = None) -> dict[str, Any]:
    return {"guided_decoding_guide_type": kind, "guided_decoding_guide": text}


# What the first cell of the table of other engines' names stands for, with a value.
HERE: dict[str, dict[str, Any]] = {
    "`max_tokens`": {"max_tokens": 5},
    "`min_tokens`": {"min_tokens": 2},
    "`top_k`": {"top_k": 3},
    "`top_p`": {"top_p": 0.5},
    "`temperature`": {"temperature": 0},
    "`seed`": {"seed": 7},
    "`n`": {"n": 2},
    "`stop_words`": {"stop": ["x"]},
    "`logprobs`": {"logprobs": 3},
    "`return_log_probs`": {"return_log_probs": True},
    "guide type `json_schema`": guide("json_schema", "{}"),
    "guide type `json`": guide("json", ""),
    "guide type `regex`": guide("regex", "a+"),
    "guide type `ebnf_grammar`": guide("ebnf_grammar", 'root ::= "a"'),
    "guide type `choice`": guide("choice", '["a"]'),
    "`exclude_input_in_output`": {"exclude_input_in_output": False},
    "`stream`": {"stream": True},
}
SCHEMA = {"name": "x", "schema": {}}
# The same under names that take another value; the others take the value itself.
ELSEWHERE: dict[tuple[str, str], dict[str, Any]] = {
    ("`temperature`", "do_sample"): {"do_sample": False},
    ("`logprobs`", "top_logprobs"): {"logprobs": True, "top_logprobs": 3},
    ("guide type `json_schema`", "guided_json"): {"guided_json": {}},
    ("guide type `json_schema`", "structured_outputs"): {"structured_outputs": {"json": {}}},
    ("guide type `json_schema`", "response_format"): {
        "response_format": {"type": "json_schema", "json_schema": SCHEMA}
    },
    ("guide type `json`", "guided_json_object"): {"guided_json_object": True},
    ("guide type `json`", "response_format"): {"response_format": {"type": "json_object"}},
    ("guide type `regex`", "guided_regex"): {"guided_regex": "a+"},
    ("guide type `regex`", "structured_outputs"): {"structured_outputs": {"regex": "a+"}},
    ("guide type `ebnf_grammar`", "guided_grammar"): {"guided_grammar": 'root ::= "a"'},
    ("guide type `ebnf_grammar`", "structured_outputs"): {"structured_outputs": {"grammar": 'root ::= "a"'}},
    ("guide type `choice`", "guided_choice"): {"guided_choice": ["a"]},
    ("guide type `choice`", "structured_outputs"): {"structured_outputs": {"choice": ["a"]}},
}


def test_every_name_of_another_engine_means_what_its_row_says() -> None:
    rows = rows_of("here")
    assert [row[0] for row in rows] == list(HERE)
    for here, *cells in rows:
        value = next(iter(HERE[here].values()))
        for name in re.findall(r"`(\w+)`", " ".join(cells)):
            given = ELSEWHERE.get((here, name), {name: value})
            assert coerce_parameters(given) == coerce_parameters(HERE[here]), (here, name)


def test_the_page_on_sampling_lists_what_is_neutral_refused_and_passed_over() -> None:
    page = (ROOT / "docs" / "sampling.md").read_text().partition("## Names of other engines")[2]
    neutral, refused, ignored = page.split("\n\n")[1:4]
    for text, names in ((neutral, NEUTRAL), (refused, UNSUPPORTED), (ignored, IGNORED)):
        assert set(re.findall(r"`(\w+)`", text)) == set(names)


def test_the_default_length_of_the_shipped_entry_is_the_one_the_readme_states() -> None:
    config = (ROOT / "model_repository" / "smollm2" / "config.pbtxt").read_text()
    (shipped,) = re.findall(r'^parameters { key: "default_max_tokens" .*"(\d+)"', config, re.MULTILINE)
    assert f"unset ({shipped} in `smollm2`)" in README


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
    source = "\n".join(path.read_text() for path in (ROOT / "mstar").rglob("*.py"))
    for owner, method in re.findall(r"`(\w+)\.(\w+)`", text):
        if owner[0].isupper():
            bodies = re.findall(rf"^class {owner}\b(.*?)(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
            assert any(f"    def {method}(" in body for body in bodies), f"{owner}.{method}"
    for command in re.findall(r"`mstar (\w+)", text):
        assert command in COMMANDS, command


def test_the_architecture_page_names_the_commands_there_are() -> None:
    (named,) = re.findall(r"the commands (.*?) \|", (ROOT / "docs" / "architecture.md").read_text())
    assert set(re.findall(r"`(\w+)`", named)) == COMMANDS


def test_make_targets_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_python_examples_are_valid() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        compile(example, "README.md", "exec")
