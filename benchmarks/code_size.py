"""How large the code is, and how much of it one batch passes through.

    python -m benchmarks.code_size                     # this checkout
    python -m benchmarks.code_size --source OTHER/src  # another one, without its batch

Lines of code are lines without blanks, comments and docstrings. The last two rows come from running
one batch: loader, plan, executor, attention and its gradients, on two virtual ranks. They count the
modules of dyncp whose functions run, and the classes whose methods do.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
SKIPPED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(text: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    blank = {i for i, line in enumerate(text.split("\n"), 1) if not line.strip()}
    return len(lines - blank)


def twice(names: list[str]) -> str:
    """How many names occur more than once, and which."""
    found = sorted(name for name, count in Counter(names).items() if count > 1)
    return f"{len(found)} {' '.join(found)}".strip()


def measure(package: Path) -> dict[str, object]:
    texts = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    lines = [lines_of_code(text) for text in texts.values()]
    classes = [
        node.name
        for text in texts.values()
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    ]
    modules = [path.stem for path in texts if not path.stem.startswith("__")]
    return {
        "files": len(texts),
        "lines of code": f"{sum(lines):,}",
        "lines of code per file, median": median(lines),
        "files of less than 40 lines of code": sum(count < 40 for count in lines),
        "classes": len(classes),
        "class names that occur twice": twice(classes),
        "module names that occur twice": twice(modules),
        "public names": count_public(texts[package / "__init__.py"]),
    }


def count_public(text: str) -> int:
    """Names of `__all__`."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


class Trace:
    """Records the modules of dyncp whose functions run, and the classes whose methods run."""

    def __init__(self, package: Path) -> None:
        self._package = f"{package}/"
        self.modules: set[str] = set()
        self.classes: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(self._package):
            return
        if frame.f_code.co_name != "<module>":
            self.modules.add(path)
        owner = frame.f_locals.get("self")
        if owner is not None and type(owner).__module__.startswith("dyncp."):
            self.classes.add(type(owner).__qualname__)


def follow_one_batch(trace: Trace) -> None:
    import threading

    import torch

    from dyncp import Batch, DCPDataLoader, DCPExecutor, Topology, attention, masks, plan_batch

    lengths = (300, 200, 100)
    samples = [{"input_ids": list(range(length))} for length in lengths]
    threading.setprofile(trace)  # type: ignore[arg-type]
    sys.setprofile(trace)  # type: ignore[arg-type]
    try:
        # The loader plans in another process, whose modules are not traced; so this plans here.
        plan_batch(Batch.of([masks.causal(length) for length in lengths]), Topology(1, 2))
        executor = DCPExecutor(virtual_ranks=2)
        with DCPDataLoader(samples, masks.causal, virtual_ranks=2) as loader:
            data, plan = next(iter(loader))
            step = executor.prepare(plan)
            tokens = data["input_ids"].numel()
            q = torch.randn(tokens, 4, 8, requires_grad=True)
            k, v = (torch.randn(tokens, 2, 8, requires_grad=True) for _ in range(2))
            attention(step, q, k, v).sum().backward()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=SOURCE)
    source = parser.parse_args().source.resolve()
    rows = measure(source / "dyncp")
    if source == SOURCE:
        trace = Trace(source / "dyncp")
        follow_one_batch(trace)
        rows["modules that one batch passes through"] = len(trace.modules)
        rows["classes of its objects"] = len(trace.classes)
    for name, value in rows.items():
        print(f"{name:<42}{value}")


if __name__ == "__main__":
    main()
