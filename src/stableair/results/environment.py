"""The environment of a run: device, versions and commit."""

import functools
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import stableair


@functools.cache
def commit() -> str:
    """The commit of the source, with a + if the source was changed; empty outside a checkout of the repository."""
    source = Path(stableair.__file__)
    git = ["git", "--no-optional-locks", "-C", str(source.parent)]  # take no locks: others may use this checkout
    commands = (["ls-files", "--error-unmatch", source.name], ["describe", "--always", "--exclude=*", "--dirty=+"])
    try:
        answers = [
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout for words in commands
        ]
    except (OSError, subprocess.CalledProcessError):  # no git, or an installed package
        return ""
    return answers[-1].strip()


def environment(device: torch.device) -> dict[str, Any]:
    """Describe this process: the device, versions and commit needed to reproduce the rounds."""
    import numpy
    import scipy

    return {
        "first_round": 0,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "stableair": stableair.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
    }
