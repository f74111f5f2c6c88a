"""Imports follow the order of the stages, and planning works without torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dyncp

ROOT = Path(dyncp.__file__).parent

# What each package may import, besides itself, `arrays`, `checks`, `compiled` and the standard
# library.
ALLOWED = {
    "arrays": set(),
    "checks": set(),
    "compiled": set(),
    "topology": set(),
    "samplers": set(),
    "masks": set(),
    "blocks": {"masks"},
    "cost": {"masks", "blocks", "topology"},
    "placement": {"blocks", "topology"},
    "schedule": {"blocks", "placement", "cost", "topology"},
    "plan": {"masks", "blocks", "placement", "schedule"},
    "verify": {"masks", "blocks", "placement", "plan", "topology"},
    "simulate": {"blocks", "placement", "schedule", "plan", "cost", "topology"},
    "planner": {"blocks", "placement", "schedule", "plan", "cost", "simulate", "topology"},
    "kernels": {"plan"},
    "transport": {"plan"},
    "gradients": {"topology"},
    "executor": {"plan", "kernels", "transport", "gradients", "topology"},
    "samples": {"masks", "blocks", "cost", "plan", "planner"},
    "dataloader": {
        "masks", "blocks", "cost", "plan", "planner", "gradients", "samples", "topology",
    },
    "losses": {"gradients", "samples"},
    "integrations": {
        "masks", "blocks", "cost", "plan", "planner", "executor", "samples", "dataloader",
        "gradients", "losses", "topology",
    },
    "calibrate": {
        "masks", "blocks", "plan", "verify", "planner", "cost", "simulate", "samplers", "topology",
        "transport", "kernels", "executor",
    },
    "cli": {
        "masks", "blocks", "placement", "schedule", "plan", "verify", "planner", "cost",
        "simulate", "samplers", "topology", "kernels", "executor", "dataloader", "calibrate",
        "integrations",
    },
}  # fmt: skip
WITHOUT_TORCH = (
    "masks", "blocks", "cost", "placement", "schedule", "plan", "verify", "simulate", "planner",
    "topology", "samplers",
)  # fmt: skip


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Top-level packages of dyncp that a file imports, and 'torch'."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "dyncp":
            names |= {f"dyncp.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    own = {name.split(".")[1] for name in names if name.startswith("dyncp.")}
    return own | ({"torch"} if any(n.split(".")[0] == "torch" for n in names) else set())


SOURCES = [p for p in sorted(ROOT.rglob("*.py")) if not package_of(p).startswith("__")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_stages(path):
    package = package_of(path)
    found = imports_of(path) - {package, "arrays", "checks", "compiled", "torch"}
    assert found <= ALLOWED[package], f"{package} must not import {found - ALLOWED[package]}"


def test_the_layout_page_names_every_file():
    page = (ROOT.parents[1] / "docs/layout.md").read_text()
    named = {word for text in re.findall(r"`([^`]+)`", page) for word in re.findall(r"\w+", text)}
    files = [*ROOT.rglob("*.py"), *ROOT.parents[1].glob("benchmarks/*.py")]
    missing = [str(p) for p in files if not p.stem.startswith("__") and p.stem not in named]
    assert not missing


def test_the_layout_page_lists_every_file_of_the_dataloader():
    page = (ROOT.parents[1] / "docs/layout.md").read_text()
    table = page.split("## Inside the dataloader")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    files = {path.stem for path in ROOT.glob("dataloader/*.py")} - {"__init__"}
    assert sorted(listed) == sorted(files)


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_planning_stages_name_torch_nowhere_at_import(package):
    for path in SOURCES:
        if package_of(path) == package:
            names = [
                n
                for n in ast.parse(path.read_text()).body
                if isinstance(n, ast.Import | ast.ImportFrom)
            ]
            assert not any("torch" in ast.unparse(n) for n in names), path


def test_planning_works_without_torch():
    code = """
import sys
sys.modules["torch"] = None  # importing it raises
from dyncp import masks, Batch, Topology, plan_batch, Plan
plan = plan_batch(Batch.of([masks.causal(100), masks.lambda_shaped(30)]), Topology(2, 2))
assert Plan.decode(plan.encode()) == plan
from dyncp.verify import verify_plan
assert verify_plan(plan, Batch.of([masks.causal(100), masks.lambda_shaped(30)])) == []
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_files_that_pages_name_exist():
    top = ROOT.parents[1]
    pages = [top / "README.md", *sorted(top.glob("docs/*.md"))]
    folders = [top, ROOT, *(path for path in ROOT.iterdir() if path.is_dir())]
    missing = [
        f"{page.name}: {name}"
        for page in pages
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text())
        if "/" in name and not any((folder / name).exists() for folder in folders)
    ]
    assert not missing
