"""Runs a `dyncp` command line, or a script, under torchrun, always with a timeout."""

import os
import subprocess
import sys


def run_under_torchrun(
    words: list[str], num_ranks: int = 2, timeout: float = 150, script: str = ""
) -> "subprocess.CompletedProcess[str]":
    """`script` is a file to run instead of `dyncp`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks)]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | os.environ
    return subprocess.run(
        [*launcher, *options, *([script] if script else ["-m", "dyncp"]), *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment,
    )
