"""The environment of a run: its device, its software versions and the commit of the source."""

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
    """Return the commit of the source, followed by + if the source has uncommitted changes.

    Outside a checkout of the repository, the result is an empty string.
    """
    source = Path(stableair.__file__)
    git = ["git", "--no-optional-locks", "-C", str(source.parent)]  # no locks: other programs may use this checkout
    commands = (["ls-files", "--error-unmatch", source.name], ["describe", "--always", "--exclude=*", "--dirty=+"])
    try:
        outputs = [
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout for words in commands
        ]
    except (OSError, subprocess.CalledProcessError):  # no git, or an installed package
        return ""
    return outputs[-1].strip()


def environment(device: torch.device) -> dict[str, Any]:
    """Describe this process, for environment.json: the device, the versions and the commit.

    Args:
        device: The device on which the rounds are computed.
    """
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
