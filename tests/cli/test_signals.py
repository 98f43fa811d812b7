"""Signals while the command starts."""

import os
import signal
import subprocess
import sys

import pytest

SIGNALLED = """
import os, signal
try:
    os.kill(os.getpid(), signal.{name})
except KeyboardInterrupt:
    pass  # as C code that loses the exception
"""
PROGRAM = """
from stableair.cli.stopping import install_signal_handlers
install_signal_handlers()
import {module}
print("lost")
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("module", ["torch", "other"])
def test_a_signal_during_the_import_of_torch_stops_the_process(name, code, module, tmp_path):
    (tmp_path / f"{module}.py").write_text(SIGNALLED.format(name=name))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    # a shell starts background processes with SIGINT ignored
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    expected = (code, "") if module == "torch" else (0, "lost\n")
    assert (done.returncode, done.stdout) == expected, done.stderr
