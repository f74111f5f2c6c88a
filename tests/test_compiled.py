"""Compiled code is cached if a folder is writable, and works without a cache."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

FUNCTION = """
import logging
logging.basicConfig()
{before}
import numpy as np
from dyncp.masks import find_runs
print(find_runs([np.arange(8, dtype=np.int32).reshape(4, 1, 2)]).start.tolist())
"""
NO_PLACE = "import numba.core.caching as c; c.CacheImpl._locator_classes = []"
FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # nothing can be written
"""


def run(before: str, cache: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FUNCTION.format(before=before)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"NUMBA_CACHE_DIR": cache},
    )


def test_what_was_compiled_is_kept(tmp_path):
    result = run("", str(tmp_path))
    assert result.stdout == "[0]\n", result.stderr
    assert list(tmp_path.rglob("*.nbc"))


def test_an_install_that_has_no_place_for_a_cache_works(tmp_path):
    result = run(NO_PLACE, str(tmp_path))
    assert result.stdout == "[0]\n", result.stderr
    assert result.stderr.count("cannot cache compiled code") == 1


def test_a_full_disk_is_told_once_and_hurts_nobody(tmp_path):
    result = run(FULL, str(tmp_path))
    assert result.stdout == "[0]\n", result.stderr
    assert result.stderr.count("cannot cache compiled code") == 1


RENAMED = """
from typing import NamedTuple
import numpy as np
from dyncp.compiled import compiled

class {name}(NamedTuple):
    numbers: np.ndarray

@compiled
def total(table: {name}) -> int:
    return table.numbers.sum()

print(total({name}(np.arange(4))))
"""


def test_a_cache_that_names_a_class_of_an_older_version_is_made_again(tmp_path):
    for name in ("Before", "Since", "Since"):
        (tmp_path / "module.py").write_text(RENAMED.format(name=name))
        result = subprocess.run(
            [sys.executable, "-c", "import module"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=tmp_path,
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        )
        assert result.stdout == "6\n", result.stderr


TOGETHER = """
import sys
from module import slow_to_compile
print(flush=True)
sys.stdin.readline()
assert slow_to_compile(3.0) == 6.0
print(sum(slow_to_compile.stats.cache_misses.values()))
"""

MODULE = """
from dyncp.compiled import compiled, inner

@inner
def twice(x):
    return x + x

@compiled
def slow_to_compile(x):
    return twice(x)
"""


def test_processes_that_start_together_compile_once(tmp_path):
    (tmp_path / "module.py").write_text(MODULE)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-c", TOGETHER], env=env, **pipes) for _ in range(3)]
    for rank in ranks:
        rank.stdout.readline()  # it is ready
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    misses = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
    assert sorted(misses) == ["0", "0", "1"]


def test_a_process_that_waits_too_long_compiles_for_itself(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr("dyncp.compiled.WAIT_SECONDS", 0.1)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "slow_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = importlib.import_module("slow_module").slow_to_compile
    folder = Path(made._cache.cache_path)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "compiling.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert made(3.0) == 6.0


def test_numbers_that_callers_write_out_are_not_compiled_for():
    code = """
from dyncp.compiled import inner
import numba
add = inner(lambda a, b: a + b)
call = numba.njit(lambda x: add(x, 1) + add(x, -2) + add(3, x))
print(call(4), len(add.overloads))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["14", "1"]
