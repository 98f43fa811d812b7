"""Try the installed package in an empty folder: version, public names, commands and Python of the README.

Run it with the Python of the environment: `env/bin/python -P try_package.py README.md 0.3.0`
"""

import platform
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


def run(words: list[str], folder: str) -> str:
    print("$", " ".join(words).partition("\n")[0], flush=True)
    return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def main(readme: str, version: str) -> None:
    import torch

    import stableair as sa

    assert "site-packages" in sa.__file__, f"not the installed package: {sa.__file__}"
    for name in sa.__all__:
        getattr(sa, name)
    text = Path(readme).read_text()
    commands = [line for block in blocks(text, "sh") for line in block.splitlines() if line.startswith("stableair ")]
    assert commands and blocks(text, "python"), "the README shows no command or no Python"
    stableair = str(Path(sys.executable).with_name("stableair"))
    with tempfile.TemporaryDirectory() as folder:
        assert run([stableair, "--version"], folder) == f"{version}\n"
        for command in commands:
            run([stableair, *shlex.split(command)[1:]], folder)
        for block in blocks(text, "python"):
            run([sys.executable, "-c", block], folder)
        run([stableair, "report", folder, "-o", "report.html"], folder)  # needs the template
        run([stableair, "figure", "fig3a", "--published", "-o", "fig3a.png"], folder)  # needs the published runs
    names = len(sa.__all__)
    print(f"stableair {version}, Python {platform.python_version()}, torch {torch.__version__}: {names} names")


if __name__ == "__main__":
    main(*sys.argv[1:])
