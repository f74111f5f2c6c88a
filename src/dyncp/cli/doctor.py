"""`dyncp doctor`: checks devices, links, groups and one plan; its JSON object goes into issues."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict

from dyncp.calibrate import Diagnosis, diagnose, open_world
from dyncp.cli.arguments import Progress, add_device_option, add_json_option, option, show

SICK = 1
MOST_RANKS_SHOWN = 16
EXAMPLES = ("dyncp doctor", "torchrun --nproc-per-node 8 -m dyncp doctor --json")


def add_options(parser: ArgumentParser) -> None:
    add_device_option(parser)
    option(parser, "--kernel", "attention kernel to check", "auto")
    add_json_option(parser)


def run(args: Namespace) -> int:
    with open_world(args.device) as world:
        progress = Progress(quiet=not world.first)
        found = diagnose(world, args.kernel, progress.show)
        progress.clear()
        if world.first:
            findings = [asdict(finding) for finding in found.findings]
            numbers = {"healthy": found.healthy, "findings": findings} | found.facts
            show(args, numbers, _text(found))
            for finding in found.findings:
                if args.json and not finding.passed:
                    print(f"dyncp: {finding.name}: {finding.sentence}", file=sys.stderr)
    return 0 if found.healthy else SICK


def _text(found: Diagnosis) -> Iterator[str]:
    facts = found.facts
    machine = facts["machine"]
    yield (
        f"{machine['system']}, {machine['cores']} cores; backends {', '.join(machine['backends'])}"
        + (f"; CUDA {machine['cuda']}, NCCL {machine['nccl']}" if machine["nccl"] else "")
    )
    for device in facts["devices"]:
        yield (
            f"GPU {device['index']}: {device['name']}, capability {device['capability']}, "
            f"{device['memory_bytes'] / 2**30:.0f} GiB"
        )
    if not facts["devices"]:
        yield "no GPU"
    yield from _peers(facts["peer_access"])
    yield from _matrix(facts["bytes_per_second"])
    if facts["kernel"] is not None:
        yield f"kernel {facts['kernel']['name']}: {facts['kernel']['reason']}"
    yield ""
    for finding in found.findings:
        yield f"{finding.name:<10}{'ok' if finding.passed else 'WRONG':<8}{finding.sentence}"
    yield ""
    wrong = sum(not finding.passed for finding in found.findings)
    yield "All is well." if not wrong else f"{wrong} of {len(found.findings)} checks failed."


def _peers(access: list[list[bool]]) -> Iterator[str]:
    apart = [(a, b) for a, row in enumerate(access) for b, there in enumerate(row) if not there]
    if len(access) > 1:
        text = ", ".join(f"{a} → {b}" for a, b in apart)
        yield f"peer access: {'all GPUs to all' if not apart else 'missing for ' + text}"


def _matrix(matrix: list[list[float | None]] | None) -> Iterator[str]:
    if matrix is None:
        return
    shown = matrix[:MOST_RANKS_SHOWN]
    yield "GB/s between ranks" + (
        f" (the first {len(shown)}; all with --json)" if len(matrix) > len(shown) else ""
    )
    yield f"{'':>6}" + "".join(f"{rank:>8}" for rank in range(len(shown)))
    for rank, row in enumerate(shown):
        cells = ("–" if rate is None else f"{rate / 1e9:.2f}" for rate in row[: len(shown)])
        yield f"{rank:>6}" + "".join(f"{cell:>8}" for cell in cells)
