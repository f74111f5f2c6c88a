"""Compiled code is cached if a folder is writable, and works without a cache."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import config

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


ADDED = """
from dyncp.compiled import compiled

@compiled
def added(a, b):
    return a + b

@compiled
def product(a, b):
    return a * b
"""


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Two compiled functions, loaded anew by every call, and the folder of their cache."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    config.reload_config()
    monkeypatch.setattr("dyncp.compiled._damaged", [])
    monkeypatch.setattr("dyncp.compiled._warned", [])
    path = tmp_path / "sums_and_products.py"
    path.write_text(ADDED)

    def load():
        spec = importlib.util.spec_from_file_location("sums_and_products", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    module = load()
    assert (module.added(1, 2), module.product(3.0, 4.0)) == (3, 12.0)
    return load, Path(module.added._cache.cache_path)


def empty(file):
    file.write_bytes(b"")


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-100])


def fill_with_garbage(file):
    file.write_bytes(bytes(range(256)) * 4)


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def add_what_pickle_ignores(file):
    file.write_bytes(file.read_bytes() + b"\1")


def zero_the_end(file):
    """As after a power failure."""
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))


def replace_by_a_folder(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize(
    "damage",
    [
        empty,
        cut_off,
        fill_with_garbage,
        flip_a_bit,
        add_what_pickle_ignores,
        zero_the_end,
        replace_by_a_folder,
    ],
)
def test_damaged_files_are_compiled_again_and_said_once(cached, caplog, damage, kind):
    load, folder = cached
    for file in folder.glob(f"*.{kind}"):
        damage(file)
    module = load()
    assert (module.added(1, 2), module.product(3.0, 4.0)) == (3, 12.0)
    unreadable = damage is replace_by_a_folder
    told = "damaged or cannot be read" if not unreadable or kind == "nbi" else "cannot cache"
    assert caplog.text.count(told) == 1
    caplog.clear()
    module = load()
    assert module.added(1, 2) == 3
    if not unreadable:  # the files are right again
        assert (module.added.stats.cache_hits.total(), caplog.text) == (1, "")


def test_a_missing_file_is_compiled_again(cached, caplog):
    load, folder = cached
    for file in folder.glob("*.nbc"):
        file.unlink()
    assert load().added(1, 2) == 3
    again = load().added
    assert (again(1, 2), again.stats.cache_hits.total(), caplog.text) == (3, 1, "")


def test_code_of_another_function_or_of_older_sources_is_not_taken(cached):
    """Numba writes the index first: a process that dies then leaves one that names other code."""
    load, folder = cached
    ours, theirs = (next(folder.glob(f"*{name}*.nbc")) for name in ("added", "product"))
    ours.write_bytes(theirs.read_bytes())
    module = load()
    assert (module.added(5, 7), module.product(5, 7)) == (12, 35)


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
