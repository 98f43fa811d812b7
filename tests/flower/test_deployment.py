"""Flower with real processes: a simulation on Ray, and a deployment with TLS and keys on loopback."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import stableair as sa
from helpers import ROOT
from stableair.algorithm import simulate

pytestmark = pytest.mark.slow

DEPLOY = ROOT / "examples/flower/deploy.sh"
PATIENCE = 240  # seconds on a busy machine; alone it takes a quarter of that


@contextlib.contextmanager
def started(words, folder, **more):
    """A command in a session of its own; whatever is left of it at the end is killed and is a failure."""
    package = str(Path(sa.__file__).resolve().parents[1])
    env = os.environ | {
        "PYTHONPATH": package, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_HOME": str(folder / "home"), **more,
    }  # fmt: skip
    log = folder / "output.log"
    with log.open("wb") as file:
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True)
        try:
            yield process, log
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)
            end = time.monotonic() + 30  # what was told to end may take a moment on a busy machine
            while (left := {pid: text for pid, text in alive() if str(folder) in text}) and time.monotonic() < end:
                time.sleep(0.2)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            assert not left, "something was left running"


def alive():
    """Every process that can be seen: its number, its command and its environment."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            yield int(path.name), (path / "cmdline").read_text().replace("\0", " ") + (path / "environ").read_text()
        except OSError:
            continue


# -------------------------------------------------------------------------------------------------------- simulation

SIMULATION = """
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
import stableair as sa
from stableair.flower import OverTheAir, client_app

e = sa.Experiment.read("experiment.toml")

def faulty(message, context, call_next):
    reply = call_next(message, context)
    n = context.node_config["partition-id"]
    if not message.content["config"].get("faulty"):
        return reply
    if n == 0:
        raise RuntimeError("client 0 broke")
    arrays = reply.content["payload"]
    name = next(iter(arrays))
    if n == 1:
        reply.content["payload"] = ArrayRecord(dict(arrays) | {name: Array(arrays[name].numpy()[:1])})
    if n == 2:
        reply.content["payload"] = ArrayRecord(dict(arrays) | {name: Array(arrays[name].numpy() * float("nan"))})
    return reply

server = ServerApp()

@server.main()
def main(grid, context):
    for name in ("good", "faulty"):
        air = OverTheAir(FedAvg(fraction_evaluate=0.0, min_train_nodes=1), e, f"runs/{name}")
        air.start(grid, num_rounds=2, timeout=100, train_config=ConfigRecord({"faulty": name == "faulty"}))
        for fault in air.left_out:
            print("LEFT OUT", fault, flush=True)

resources = {"init_args": {"num_cpus": 2, "include_dashboard": False}, "client_resources": {"num_cpus": 1}}
run_simulation(server, client_app(e, mods=[faulty]), num_supernodes=5, backend_config=resources)
"""


def expected(experiment, heard):
    """The model after a plain run in which only some clients take part."""
    sim = sa.build(experiment)

    def some(k):
        return torch.tensor([n for n in sim.participants(k).tolist() if n in heard(k)])

    chosen = replace(sim, participants=some)
    *_, last = simulate(chosen, sim.start, experiment.rounds)
    return last.state.model


def test_a_simulation_has_the_bits_of_a_plain_run_with_faulty_clients_too(tmp_path):
    e = sa.Experiment(partition="dirichlet_by_class(beta=2.0)", model="logistic()", clients=5, rounds=2, local_epochs=1,
                      receiver="mac(C=auto)", device="cpu", engine="reference")  # fmt: skip
    (tmp_path / "experiment.toml").write_text(e.to_toml())
    with started([sys.executable, "-W", "ignore", "-c", SIMULATION], tmp_path) as (process, log):
        assert process.wait(PATIENCE) == 0, log.read_text()
    good, faulty = (sa.load(tmp_path / "runs" / name) for name in ("good", "faulty"))
    assert torch.equal(good.state.model.w, sa.run(e).state.model.w)
    assert torch.equal(faulty.state.model.w, expected(e, lambda k: (3, 4)).w)
    assert (good["channel/senders"], faulty["channel/senders"]) == ([5, 5], [2, 2])
    assert len(re.findall("LEFT OUT", log.read_text())) == 6
    for why in ("reason='client 0 broke'", "must have shape (10, 64): got (1, 64)", "weights must be finite"):
        assert why in log.read_text()


# --------------------------------------------------------------------------------------------------------- deployment


def free_ports():
    """The first of six ports in a row that nobody listens on: a deployment's four, and two for nodes it refuses."""
    for first in range(21000 + 6 * (os.getpid() % 800), 60000, 6):  # another process has another six
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + 6):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


def listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def addresses(first):
    """The local addresses on which the four ports of a deployment listen."""
    ports = {f"{port:04X}" for port in range(first, first + 4)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = [row[1].split(":") for row in rows if row[3] == "0A" and row[1].split(":")[1] in ports]
    return {
        socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address for address, _ in listening
    }


def runs_without_certificate(port):
    """Whether the SuperLink lists its runs to a client without ca.crt, key or account."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    url, headers = f"https://127.0.0.1:{port}/v1/control/list-runs", {"Content-Type": "application/protobuf"}
    request = urllib.request.Request(url, data=b"", headers=headers)
    with urllib.request.urlopen(request, context=context) as response:
        return response.status == 200 and b"over-the-air" in response.read()


def recorded(run):
    """How many rounds a run's folder has."""
    rounds = run / "rounds.jsonl"
    return rounds.read_text().count("\n") if rounds.exists() else 0


def kill(*words):
    """Kill the one process that has all of these words in its command and environment."""
    (pid,) = [pid for pid, text in alive() if all(word in text for word in words)]
    os.kill(pid, signal.SIGKILL)


def made(command, folder):
    """The folder, with what a command makes in it."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(shlex.split(command), cwd=folder, capture_output=True, check=True)
    return folder


KEY = "ssh-keygen -q -t ecdsa -b 384 -N '' -f key"
CERTIFICATE = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -subj /CN=me -keyout key -out "


def waited(condition, process, log):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    return found


def test_a_deployment_survives_the_death_of_its_superlink_and_of_a_node_and_refuses_unknown_nodes(tmp_path):
    e = sa.Experiment(partition="dirichlet_by_class(beta=2.0)", model="logistic()", clients=3, rounds=3, local_epochs=1,
                      receiver="mac(C=auto)", device="cpu", engine="reference")  # fmt: skip
    settings = {"partition": e.partition, "model": e.model, "rounds": 3, "local_epochs": 1, "receiver": e.receiver}
    (tmp_path / "settings.toml").write_text("".join(f"{key} = {json.dumps(v)}\n" for key, v in settings.items()))
    run, port = tmp_path / "run", free_ports()
    keys, deploy = run / "flower", [DEPLOY, run, tmp_path / "settings.toml"]

    with started(deploy, tmp_path, PORT=str(port)) as (process, log):
        waited(lambda: recorded(run) == 1, process, log)
        assert addresses(port) == {"127.0.0.1"}
        assert runs_without_certificate(port), "Flower authenticates accounts now: correct the danger box of flower.md"
        kill("flower-superlink", "--database", str(keys))  # the second round has just begun
        assert process.wait(PATIENCE) == 2
        assert "not complete (its SuperLink is gone)" in log.read_text().splitlines()[-1]
    stranger, misled = made(KEY, tmp_path / "stranger"), made(CERTIFICATE + "ca.crt", tmp_path / "misled")

    def node(number, key, certificate):
        program = Path(sys.executable).parent / "flower-supernode"
        return [program, "--superlink", f"127.0.0.1:{port}", "--root-certificates", certificate,
                "--auth-supernode-private-key", key, "--port", str(port + number)]  # fmt: skip

    with started(deploy, tmp_path, PORT=str(port)) as (process, log):
        waited(lambda: listening(port), process, log)
        with (
            started(node(4, stranger / "key", keys / "ca.crt"), stranger) as (first, its_words),
            started(node(5, keys / "node0", misled / "ca.crt"), misled) as (second, other_words),
        ):
            waited(lambda: recorded(run) == 2, process, log)
            kill("flower-supernode", "--auth-supernode-private-key node2", str(keys))  # and so has the third
            assert first.wait(PATIENCE) == second.wait(PATIENCE) == 1
        assert "Failed to initialize the connection" in its_words.read_text()
        assert "CERTIFICATE_VERIFY_FAILED" in other_words.read_text()
        assert process.wait(PATIENCE) == 0, log.read_text()
    found = sa.load(run)
    assert found["channel/senders"] == [3, 3, 2]
    assert torch.equal(found.state.model.w, expected(e, lambda k: (0, 1, 2) if k < 2 else (0, 1)).w)
    assert "is left out" in log.read_text()


@pytest.mark.parametrize(("sent", "code", "rounds"), [(signal.SIGINT, 130, 0), (signal.SIGTERM, 143, 1)])
def test_a_stopped_deployment_leaves_no_process(sent, code, rounds, tmp_path):
    run, port = tmp_path / "run", free_ports()
    with started([DEPLOY, run], tmp_path, PORT=str(port)) as (process, log):
        waited(lambda: listening(port) and recorded(run) >= rounds, process, log)
        process.send_signal(sent)
        assert process.wait(60) == code, log.read_text()
        assert not [pid for pid, text in alive() if str(run) in text]


def test_a_network_namespace_hides_the_deployment(tmp_path):
    """The command of the documentation against other users of the machine."""
    own = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*own, "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("this machine does not allow network namespaces")
    run, port = tmp_path / "run", free_ports()
    command = [*own, "sh", "-c", f"ip link set lo up && exec {DEPLOY} {run}"]
    with started(command, tmp_path, PORT=str(port)) as (process, log):
        waited(lambda: recorded(run) >= 1, process, log)
        assert not listening(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143, log.read_text()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("port", "is in use"),
        ("key", "did you mean 'noise'"),
        ("clients", "clients is 5, but this script starts 3 nodes"),
        ("ca", "is not a certificate for 127.0.0.1 signed by ca.crt"),
        ("0.0.0.0", "BIND must be a loopback address"),
        ("192.168.1.7", "BIND must be a loopback address"),
        ("::", "BIND must be a loopback address"),
        ("127.0.0.1.example.org", "BIND must be a loopback address"),
    ],
)
def test_the_deployment_refuses_in_one_line(wrong, why, tmp_path):
    port, run = free_ports(), tmp_path / "run"
    settings = tmp_path / "settings.toml"
    settings.write_text({"key": 'noize = "none()"', "clients": "clients = 5"}.get(wrong, ""))
    bind = wrong if wrong[0] in "0123456789:" else "127.0.0.1"
    if wrong == "ca":
        for name in ("ca.crt", "server.pem"):  # each signed by itself
            made(CERTIFICATE + name, run / "flower")
    with socket.socket() as taken:
        if wrong == "port":
            taken.bind(("127.0.0.1", port + 2))
            taken.listen()
        with started([DEPLOY, run, settings], tmp_path, PORT=str(port), BIND=bind) as (process, log):
            assert process.wait(PATIENCE) == 2
    (line,) = log.read_text().splitlines()
    assert why in line
