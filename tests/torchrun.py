"""Runs a `dyncp` command line, or a script, on ranks: under torchrun in a full run."""

import os
import subprocess
import sys

import sizes
from processes import run_program


def run_under_torchrun(
    words: list[str], num_ranks: int = 2, timeout: float = 150, script: str = ""
) -> "subprocess.CompletedProcess[str]":
    """`script` is a file to run instead of `dyncp`. Starting torchrun and importing everything in
    every rank takes 10 s, so a small run forks ranks that look the same to the program."""
    if sizes.pick(True, False):
        return run_program(words, num_ranks, script, timeout)
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
