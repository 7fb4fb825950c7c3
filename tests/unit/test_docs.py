"""Tests README, ARCHITECTURE and docs/: links, paths, generated parts, pictures, printed outputs, named fields."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.blocks import list_blocks
from support.commands import run
from support.generated_docs import COMMAND, DOCS, PAGES, fill
from support.house import MODULES, PACKAGE, ROOT, parse
from support.json_page import find_undocumented, find_unused

from ulysses_cli import __version__
from ulysses_cli.plan.recipe.schema import walk_settings

# Names that docs use but no folder of the repository has: files of a run, of a user, and those that a reader makes.
NOT_OURS = re.compile(r"(~|output_dir|runs|logs|model)/.*|.*[A-Z*].*|use\.py|\w+(\.schema)?\.(html|yaml|json)")
SUFFIXES = (".py", ".md", ".yaml", ".json", ".jinja", ".toml", ".txt")
readme = (ROOT / "README.md").read_text()


def drop_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def list_anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", drop_blocks(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def list_links(page: Path) -> list[str]:
    text = drop_blocks(page.read_text())
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_anchors(page: Path) -> None:
    for link in list_links(page):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in list_anchors(target), f"{page.name}: {link}"


def list_paths(page: Path) -> Iterator[str]:
    for word in re.findall(r"`([^`\s]+)`", drop_blocks(page.read_text())):
        if word.endswith(SUFFIXES) or (word.endswith("/") and "/" in word):
            yield word


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_paths_that_docs_name_exist(page: Path) -> None:
    names = {path.name for room in ("ulysses_cli", "tests", "benchmarks") for path in (ROOT / room).rglob("*")}
    for word in list_paths(page):
        places = [base / word for base in (ROOT, PACKAGE, ROOT / "tests")]
        is_there = any(place.exists() for place in places) or (
            "/" not in word.rstrip("/") and word.rstrip("/") in names
        )
        assert is_there or NOT_OURS.fullmatch(word), f"{page.name}: {word}"


def test_every_page_can_be_found_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in list_links(ROOT / "README.md")}
    assert {page.relative_to(ROOT).as_posix() for page in PAGES} - {"README.md"} <= linked


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    def list_pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from list_pages(part)

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(list_pages(site["nav"])) == sorted(page.relative_to(ROOT).as_posix() for page in PAGES)


def test_what_is_cited_is_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_and_pictures_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert text == fill(page, text), f"{page.name} is not what the code says: {COMMAND}"


def test_the_recipe_of_the_readme_is_valid_and_its_outputs_are_real(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(list_blocks(readme, "yaml")[0])
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "a.txt").write_text("A document.\n")
    assert run("validate-config", "my.yaml", cwd=tmp_path).returncode == 0
    wrong, estimate, _ = list_blocks(readme, "console")
    command, _, expected = wrong.partition("\n")
    result = run(*command.removeprefix("$ ulysses ").split(), cwd=tmp_path)
    assert (result.returncode, result.stderr.strip()) == (2, expected.strip())
    command, _, expected = estimate.partition("\n")
    words, _, num_lines = command.removeprefix("$ ulysses ").partition(" | head -")
    result = run(*words.split(), cwd=tmp_path)
    assert result.stdout.splitlines()[: int(num_lines)] == expected.splitlines()


GROUPS = ("recipes", "launch")  # commands that have commands


def test_commands_that_docs_print_exist() -> None:
    """Checks that each `ulysses` command of a block has a help page that lists its options."""
    helps: dict[str, str] = {}
    for page in PAGES:
        blocks = [*list_blocks(page.read_text(), "sh"), *list_blocks(page.read_text(), "console")]
        for line in "".join(blocks).splitlines():
            line = line.removeprefix("$ ").partition("#")[0].partition("|")[0]
            if not line.startswith("ulysses "):
                continue
            command, *words = line.split()[1:]
            if command in GROUPS:
                command, words = f"{command} {words[0]}", words[1:]
            if command not in helps:
                helps[command] = run(*command.split(), "--help").stdout
                assert "Usage:" in helps[command], f"{page.name}: {line}"
            for word in words:
                assert not word.startswith("--") or f"{word} " in helps[command], f"{page.name}: {line}"


def test_settings_that_docs_name_exist() -> None:
    keys = {setting.key.replace("[]", "") for setting in walk_settings()}
    sections = {key.partition(".")[0] for key in keys}
    for page in PAGES:
        for word in re.findall(r"`(\w+(?:\.\w+)+)(?:: [^`]*|=[^`]*)?`", drop_blocks(page.read_text())):
            if word.partition(".")[0] in sections and not word.endswith(SUFFIXES):
                assert re.sub(r"\.\d+", "", word) in keys, f"{page.name}: {word}"


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    def load(name: str) -> Any:
        return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())

    exchange, levers = load("exchange-cpu")["cases"], load("levers-cpu")["cases"]
    for case in exchange.values():
        assert (case["ours"]["collectives"], case["deepspeed"]["collectives"]) == (4, 9)
    ours, peer = (levers[f"{name}, 16384 tokens, 4 layers"] for name in ("all", "(b) DeepSpeed, all of its"))
    flops = ours["GFLOPs without head"] / peer["GFLOPs without head"]
    rows = load("estimate")["a real step's peak: counted, predicted"]
    steps = [row for row in rows if row["what"].startswith("ledger")]
    errors = [100 * row["error"] for row in steps]
    faults = [load(name) for name in ("faults-cpu", "faults-2-hosts-cpu", "faults-4-hosts-cpu")]
    for found in faults:
        assert found["is_finished"]
        assert found["all"]["lost"] == found["all"]["hung"] == 0
    injected, survived, refused, lost, hung = faults[0]["all"].values()
    table = (DOCS / "benchmarks.md").read_text()
    for found in faults:
        assert f" | {' | '.join(map(str, found['all'].values()))} |".removeprefix(" ") in table
    for figure in (
        "4 collectives, forward and backward (5 with checkpointing); DeepSpeed 0.19.8 takes 9",
        f"{flops:.2f} of the FLOPs of DeepSpeed's levers, the output head not counted",
        f"peak {ours['peak']:.0f} MiB, DeepSpeed {peer['peak']:.0f}",
        f"{len(steps)} real steps of DeepSpeed: within {max(map(abs, errors)):.2f} %",
        f"of {injected} faults {survived} survived, {refused} refused, {lost} lost, {hung} hung",
        f"{100 * load('data-cpu')['packing_efficiency']:.1f} % of a row is filled",
    ):
        assert figure in readme


def test_names_that_examples_import_exist() -> None:
    for page in PAGES:
        for block in list_blocks(page.read_text(), "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ulysses_cli"):
                    module = str(node.module).removeprefix("ulysses_cli.").replace(".", "/")
                    defined = {getattr(definition, "name", "") for definition in parse(MODULES[module]).body}
                    assert {alias.name for alias in node.names} <= defined, f"{page.name}: {module}"


GPU_COMMANDS = "".join(list_blocks((DOCS / "gpus.md").read_text(), "sh")).splitlines()
LIGHT = ("init", "validate-config", "estimate-memory", "plan")


@pytest.mark.check
def test_the_page_leads_from_chats_to_a_recipe_that_fits(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "another " * 200}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 50)
    output = {}
    for command in GPU_COMMANDS:
        tool, name, *words = shlex.split(command)
        if tool == "ulysses" and name in LIGHT:
            done = run(name, *words, cwd=tmp_path, HF_HUB_OFFLINE="1")
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            output[name] = done.stdout
    assert set(output) == set(LIGHT)
    recipe = yaml.safe_load((tmp_path / "my.yaml").read_text())
    assert "lora" in recipe  # one RTX 4090 has no room for all weights of an 8B model
    assert "quantize_base" not in recipe["lora"]
    assert "verdict    fits" in output["estimate-memory"]
    assert "8 x h100-80gb" in output["plan"]


SHIPPED = ROOT / "recipes"
LONG = str(SHIPPED / "llama-3.1-8b-128k-8gpu.yaml")
SMALL = str(SHIPPED / "qwen3-4b-32k-lora-24gb.yaml")
PLAN = ("plan", "--model", "Qwen/Qwen3-0.6B", "--gpus", "h100-80gb:1")
COMMANDS: dict[str, list[tuple[str, ...]]] = {
    "ulysses validate-config": [
        ("validate-config", LONG, "--gpu", "h100-80gb", "--nnodes", "2"),
        ("validate-config", LONG, "parallel.ring_size=3"),
    ],
    "ulysses estimate-memory": [
        ("estimate-memory", SMALL, "data.max_length=512"),
        ("estimate-memory", "--model", "Qwen/Qwen3-0.6B", "--max-length", "2Ki", "--sweep"),
    ],
    "ulysses plan": [(*PLAN, "--max-length", "4Ki"), (*PLAN, "--max-length", "64Mi"), (*PLAN, "--longest")],
    "ulysses models": [("models",)],
    "A model": [("models", "Qwen/Qwen3-8B")],
    "ulysses recipes list": [("recipes", "list")],
    "Problems": [("estimate-memory", LONG, "parallel.ring_size=3")],
}


@pytest.mark.check
@pytest.mark.parametrize("section", COMMANDS)
def test_the_page_names_the_fields_of_a_command(section: str) -> None:
    answers: list[Any] = [json.loads(run(*words, "--format", "json").stdout) for words in COMMANDS[section]]
    assert not [name for answer in answers for name in find_undocumented(section, answer)]
    assert not find_unused(section, answers)


FOLDER = ROOT / "docs" / "pictures"


@pytest.mark.full
def test_pictures_are_what_the_script_makes() -> None:
    """Compares the picture of a report page, which needs a run and Chromium, by the hash of its inputs."""
    command = [sys.executable, str(FOLDER / "make.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
