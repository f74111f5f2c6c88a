"""The row kernels as Triton compiles them for Hopper, without a GPU: they load and store 16 bytes
at once, and clear sums only after all warps have read them."""

import json
import os
import subprocess
import sys

import pytest

from interpreted import needs_interpreter

CODE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dyncp.kernels import triton_row_kernels as row_kernels

POINTERS = {"table": "i64", "targets": "i64", "sources": "i64", "wide": "fp32", "lse": "fp32"}
CONSTANTS = {
    "copy": {"VECTOR": 8, "ROWS": 8, "COLUMNS": 512, "HEADS": 32},
    "outputs": {"DIM": 128, "PADDED": 128, "SUMS_DIM": 0, "HAS_LSE": True,
                "ONLY_INPUT": True, "VECTOR": 8},
    "gradients": {"DIM": 128, "PADDED": 128, "SUMS_DIM": 128, "HAS_LSE": False,
                  "ONLY_INPUT": False, "VECTOR": 8},
    "row_sums": {"DIM": 128, "PADDED": 128, "LOG2": True, "VECTOR": 8},
}
KERNELS = {
    "copy": row_kernels.copy_chunk,
    "outputs": row_kernels.combine_chunk,
    "gradients": row_kernels.combine_chunk,
    "row_sums": row_kernels.row_sums_of_chunk,
}
found = {}
for name, kernel in KERNELS.items():
    signature, aligned = {}, {}
    for i, parameter in enumerate(p.name for p in kernel.params):
        if parameter in CONSTANTS[name]:
            signature[parameter] = "constexpr"
        elif "stride" in parameter or parameter in ("lse_row", "lse_head"):
            signature[parameter] = "i64"
        elif parameter == "scale":
            signature[parameter] = "fp32"
        else:
            signature[parameter] = "*" + POINTERS.get(parameter, "bf16")
            if parameter != "lse":
                aligned[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, CONSTANTS[name], aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    found[name] = compiled.asm["ptx"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ptx():
    """PTX by kernel, compiled in a separate process: here, the interpreter has replaced the
    kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_interpreter
@pytest.mark.parametrize("kernel", ["copy", "outputs", "gradients", "row_sums"])
def test_rows_are_loaded_and_stored_16_bytes_at_once(ptx, kernel):
    assert "ld.global.v4.b32" in ptx[kernel]
    assert "ld.global.b16" not in ptx[kernel]
    assert "st.global.b16" not in ptx[kernel]


@needs_interpreter
def test_sums_are_cleared_after_a_barrier(ptx):
    lines = [line.split("//")[0].strip() for line in ptx["gradients"].splitlines()]
    cleared = [i for i, line in enumerate(lines) if "st.global.v4.b32" in line and same(line)]
    assert cleared, "nothing is cleared"
    loads = [i for i in range(cleared[0]) if "ld.global.v4.b32" in lines[i]]
    assert any("bar.sync" in line for line in lines[loads[-1] : cleared[0]])


def same(line):
    """Whether one register is stored four times."""
    stored = line[line.index("{") + 1 : line.index("}")].split(",")
    return len({register.strip() for register in stored}) == 1
