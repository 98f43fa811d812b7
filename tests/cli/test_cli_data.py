"""`stableair data`."""

import json

from helpers.words import with_changes


def test_data_shows_lists_and_checks(command, tmp_path, data_folder):
    code, out, _ = command("data", "show", "digits", "--partition", "dirichlet(0.3)", "--clients", 7, "-o", "l.png")
    assert code == 0
    assert out.splitlines() == [
        "1437 samples, 10 classes, 7 clients by dirichlet(beta=0.3)",
        "samples per client: 205 to 206; classes per client: 7 to 9",
        "l.png",
    ]
    assert (tmp_path / "l.png").stat().st_size > 1000
    code, out, _ = command("data", "list")
    assert (code, out.splitlines()[0]) == (0, str(data_folder))
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["cifar10", "cifar100", "femnist"]
    assert out.count("MB") == 4
    assert "not found" not in out
    assert "matches its description" in command("data", "check", "cifar10")[1]
    assert command("data", "prepare", "cifar10")[1] == f"{data_folder / 'cifar10.safetensors'}\n"


def test_another_data_folder_is_used_and_checked(command, tmp_path, data_folder, monkeypatch):
    monkeypatch.setenv("STABLEAIR_DATA", str(data_folder))  # restored after the test
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "cifar10.safetensors").write_bytes((data_folder / "cifar10.safetensors").read_bytes())
    small = "rounds=1", "clients=2", "model=logistic()", "norm_stats=clients"
    words = "run", "cifar10", *small, "--data-dir", "d", "--out", "r"
    code, _, errors = command(*words)
    assert (code, errors) == (
        0,
        "warning: d/cifar10.safetensors is unchecked: its description cifar10.json is missing\n",
    )
    environment = json.loads((tmp_path / "r" / "environment.json").read_text())[0]
    written = json.loads((data_folder / "cifar10.json").read_text())["sha256"]
    assert environment["data"] == {"cifar10.safetensors": written}
    altered = bytearray((tmp_path / "d" / "cifar10.safetensors").read_bytes())
    altered[-1] ^= 1
    (tmp_path / "d" / "cifar10.safetensors").write_bytes(altered)
    code, _, errors = command(*with_changes(words, "rounds=2"), "--resume")
    assert code == 2
    assert "r was started with different data files" in errors
    assert "matches its description" in command("data", "check", "cifar10", "--describe", "--data-dir", "d")[1]
