"""How long the loader waits for other ranks, threads and processes, in seconds.

Used as `patience.NAME`, so that tests can `shorten` it.
"""

HEARTBEAT = 1.0
COMPARED = 5.0  # process 0 compares the batches of all ranks this often
WARNED = 5.0  # of waiting until the first warning; the next ones after 10, 20, ... s
SILENT = 5.0  # without a heartbeat: mentioned in warnings
GONE = 50.0  # without a heartbeat: an error, unless the process is seen to run
ABSENT = 3600.0  # for a rank that has not begun to make its loader; it may be preparing data
LINGER = 3.0  # so that other ranks can read the last verdict before this process ends
PLAN_END = 1.0  # to finish plans that are being made when an iteration is closed
JOIN = 10.0  # for threads of an iteration that is closed
FATE = 0.5  # for a process whose connections are closed to end
HURRY = 5.0  # for answers of the store when only clean-up is left
WORKER_END = 5.0  # for workers to finish the samples that they are reading


def shorten(factor: float = 0.1) -> None:
    """Makes this process notice sooner that others are late or dead, in a test."""
    for name in ("HEARTBEAT", "COMPARED", "WARNED", "SILENT"):
        globals()[name] *= factor
