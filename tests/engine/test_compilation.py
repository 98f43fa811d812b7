"""The compilation of the kernels, for a GPU that need not be there."""

import os
import re
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(triton, "AsyncCompileMode"), reason="this version of Triton has no parallel compilation"
)
def test_all_kernels_of_a_step_are_compiled_for_a_hopper_gpu_before_the_first_one_runs(tmp_path):
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "helpers.compile_kernels"]
    variables |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (functions, variants), again = (map(int, line.split()) for line in done.stdout.splitlines())
    assert functions == 10, "the number of kernels of the package"
    assert variants > functions
    assert [*again] == [0, 0], "every variant that a step needs"
    assert re.search(r"^compiling kernels \d+/\d+; ", done.stderr, re.MULTILINE)
