"""Plants every silent error of context parallelism that dyncp handles, and runs a test that fails.

    python -m benchmarks.planted                  all errors, one by one
    python -m benchmarks.planted sinks softcap    errors with these words in their names

Works on a copy of the sources. Prints for each error whether its test noticed it. The exit code is
1 if a test did not notice, or if a line to be changed no longer exists.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from benchmarks.planted_errors import ERRORS, Error

ROOT = Path(__file__).parents[1]


def notices(error: Error, folder: Path) -> str:
    """The result of the test on a copy of the sources with the error in it."""
    path = folder / error.file
    text = path.read_text(encoding="utf-8")
    if error.before not in text:
        return "the line to be changed is GONE"
    path.write_text(text.replace(error.before, error.after), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    command += [error.tests, "-k", error.chosen]
    environment = os.environ | {"PYTHONPATH": "src:tests:."}
    try:
        found = subprocess.run(
            command,
            check=False,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
    finally:
        path.write_text(text, encoding="utf-8")
    if found.returncode == 1:
        return "noticed"
    return "NOT NOTICED" if found.returncode == 0 else f"NO TEST RAN: {found.stdout[-300:]}"


def main() -> int:
    words = sys.argv[1:]
    errors = [e for e in ERRORS if not words or any(word in e.name for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in ("src", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "pyproject.toml", folder)
        for error in errors:
            started = perf_counter()
            found = notices(error, folder)
            missed += found != "noticed"
            print(f"{error.name:70} {found:12} {perf_counter() - started:4.0f} s", flush=True)
    print(f"{len(errors)} planted, {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
