import numpy as np
import pytest

FLOWERS = "length,width,species,gardener\n" + "".join(
    f"{c + 0.1 * i},{2 * c - 0.1 * i},{name},g{i % 3}\n" for i in range(10) for c, name in enumerate(("rose", "iris"))
)


@pytest.fixture
def sample_files(tmp_path, monkeypatch):
    """A folder with flowers.csv, a table of 20 rows, and tokens.npz, 30 sequences of 5 token ids."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flowers.csv").write_text(FLOWERS)
    x = np.arange(150).reshape(30, 5) % 7
    np.savez(tmp_path / "tokens.npz", x=x, y=np.arange(30) % 3)
    return tmp_path
