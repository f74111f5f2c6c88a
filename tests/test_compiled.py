"""Compiled code is kept where there is room, and works without."""

import os
import subprocess
import sys

FUNCTION = """
import logging
logging.basicConfig()
{before}
import numpy as np
from dyncp.arrays import frozen
from dyncp.plan.rows import _run_starts
rows = frozen(np.arange(8))
print(_run_starts(rows, 2, 4, frozen(np.array([0]))).tolist())
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
    assert result.stderr.count("compiled code is not kept") == 1


def test_a_full_disk_is_told_once_and_hurts_nobody(tmp_path):
    result = run(FULL, str(tmp_path))
    assert result.stdout == "[0]\n", result.stderr
    assert result.stderr.count("compiled code is not kept") == 1
