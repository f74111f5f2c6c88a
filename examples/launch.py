"""`launch`: starts torchrun for examples that run on several processes, and stops it when they
end."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from dyncp.checks import usable_cores

GRACE_SECONDS = 40  # torchrun itself gives its workers 30 before it kills them
COPY_SECONDS = 5  # for copying the last lines of ranks that have ended
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def launch(words: Sequence[str], num_ranks: int) -> int:
    """Runs `torchrun --nproc-per-node num_ranks WORDS` and returns its exit code."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks)]
    with _stopping_on_signals():
        # A new session: Ctrl-C reaches only this process, and torchrun stops its workers in order.
        process = subprocess.Popen(
            [*torchrun, *options, *words],
            env=_environment(num_ranks),
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        stopping = threading.Event()
        copier = threading.Thread(target=_copy_errors, args=(process.stderr, stopping), daemon=True)
        copier.start()
        try:
            return process.wait()
        except BaseException:
            stopping.set()
            raise
        finally:
            _stop(process)
            copier.join(COPY_SECONDS)


def _environment(num_ranks: int) -> dict[str, str]:
    """The environment for torchrun, OpenMP and gloo; variables that the user has set are kept."""
    defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // num_ranks))}
    if sys.platform in LOOPBACK:
        defaults["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
    return defaults | os.environ


def _copy_errors(source: IO[bytes], stopping: threading.Event) -> None:
    """Copies the error output of the ranks, except messages that they are being stopped."""
    for line in source:
        if not stopping.is_set():
            sys.stderr.buffer.write(line)
            sys.stderr.flush()


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process through `finally` blocks, as Ctrl-C does."""

    def leave(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not cut this short
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
    signal.signal(signal.SIGINT, before)
