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
PATIENCE = 240  # seconds, for a busy machine; an idle machine needs a quarter


@contextlib.contextmanager
def started(words, folder, **more):
    """A command in a separate session. Processes that are left at the end are killed, and the test fails."""
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
            end = time.monotonic() + 30  # processes may need some time to exit on a busy machine
            while (left := {pid: text for pid, text in alive() if str(folder) in text}) and time.monotonic() < end:
                time.sleep(0.2)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            assert not left, "processes were left running"


def alive():
    """The visible processes: (process id, command and environment)."""
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


def expected(experiment, senders):
    """The model after a run without Flower in which only the clients `senders(k)` participate in round k."""
    sim = sa.build(experiment)

    def some(k):
        return torch.tensor([n for n in sim.participants(k).tolist() if n in senders(k)])

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
    for reason in ("reason='client 0 broke'", "must have shape (10, 64): got (1, 64)", "weights must be finite"):
        assert reason in log.read_text()


# --------------------------------------------------------------------------------------------------------- deployment


def free_ports():
    """The first of six free consecutive ports: four for a deployment, and two for nodes that it refuses."""
    for first in range(21000 + 6 * (os.getpid() % 800), 60000, 6):  # different ports for each process
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


def recorded_rounds(run):
    """Number of recorded rounds of a run folder."""
    rounds = run / "rounds.jsonl"
    return rounds.read_text().count("\n") if rounds.exists() else 0


def kill(*words):
    """Kill the one process that has all of these words in its command and environment."""
    (pid,) = [pid for pid, text in alive() if all(word in text for word in words)]
    os.kill(pid, signal.SIGKILL)


def run_in_folder(command, folder):
    """Run a command in a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(shlex.split(command), cwd=folder, capture_output=True, check=True)
    return folder


KEY = "ssh-keygen -q -t ecdsa -b 384 -N '' -f key"
CERTIFICATE = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -subj /CN=me -keyout key -out "


def wait_for(condition, process, log):
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    return value


def test_a_deployment_continues_after_its_superlink_or_a_node_was_killed_and_refuses_unknown_nodes(tmp_path):
    e = sa.Experiment(partition="dirichlet_by_class(beta=2.0)", model="logistic()", clients=3, rounds=3, local_epochs=1,
                      receiver="mac(C=auto)", device="cpu", engine="reference")  # fmt: skip
    settings = {"partition": e.partition, "model": e.model, "rounds": 3, "local_epochs": 1, "receiver": e.receiver}
    (tmp_path / "settings.toml").write_text("".join(f"{key} = {json.dumps(v)}\n" for key, v in settings.items()))
    run, port = tmp_path / "run", free_ports()
    keys, deploy = run / "flower", [DEPLOY, run, tmp_path / "settings.toml"]

    with started(deploy, tmp_path, PORT=str(port)) as (process, log):
        wait_for(lambda: recorded_rounds(run) == 1, process, log)
        assert addresses(port) == {"127.0.0.1"}
        assert runs_without_certificate(port), "Flower authenticates accounts now: correct the danger box of flower.md"
        kill("flower-superlink", "--database", str(keys))  # the second round has just begun
        assert process.wait(PATIENCE) == 2
        assert "not complete (its SuperLink is gone)" in log.read_text().splitlines()[-1]
    unknown_node, wrong_certificate = (
        run_in_folder(KEY, tmp_path / "unknown_node"),
        run_in_folder(CERTIFICATE + "ca.crt", tmp_path / "wrong_certificate"),
    )

    def node(number, key, certificate):
        program = Path(sys.executable).parent / "flower-supernode"
        return [program, "--superlink", f"127.0.0.1:{port}", "--root-certificates", certificate,
                "--auth-supernode-private-key", key, "--port", str(port + number)]  # fmt: skip

    with started(deploy, tmp_path, PORT=str(port)) as (process, log):
        wait_for(lambda: listening(port), process, log)
        with (
            started(node(4, unknown_node / "key", keys / "ca.crt"), unknown_node) as (first, first_log),
            started(node(5, keys / "node0", wrong_certificate / "ca.crt"), wrong_certificate) as (second, second_log),
        ):
            wait_for(lambda: recorded_rounds(run) == 2, process, log)
            kill("flower-supernode", "--auth-supernode-private-key node2", str(keys))  # and so has the third
            assert first.wait(PATIENCE) == second.wait(PATIENCE) == 1
        assert "Failed to initialize the connection" in first_log.read_text()
        assert "CERTIFICATE_VERIFY_FAILED" in second_log.read_text()
        assert process.wait(PATIENCE) == 0, log.read_text()
    found = sa.load(run)
    assert found["channel/senders"] == [3, 3, 2]
    assert torch.equal(found.state.model.w, expected(e, lambda k: (0, 1, 2) if k < 2 else (0, 1)).w)
    assert "is left out" in log.read_text()


@pytest.mark.parametrize(("sent", "code", "rounds"), [(signal.SIGINT, 130, 0), (signal.SIGTERM, 143, 1)])
def test_a_stopped_deployment_leaves_no_process(sent, code, rounds, tmp_path):
    run, port = tmp_path / "run", free_ports()
    with started([DEPLOY, run], tmp_path, PORT=str(port)) as (process, log):
        wait_for(lambda: listening(port) and recorded_rounds(run) >= rounds, process, log)
        process.send_signal(sent)
        assert process.wait(60) == code, log.read_text()
        assert not [pid for pid, text in alive() if str(run) in text]


def test_a_network_namespace_hides_the_deployment(tmp_path):
    """The command of the documentation against other users of the machine."""
    namespace = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*namespace, "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("this machine does not allow network namespaces")
    run, port = tmp_path / "run", free_ports()
    command = [*namespace, "sh", "-c", f"ip link set lo up && exec {DEPLOY} {run}"]
    with started(command, tmp_path, PORT=str(port)) as (process, log):
        wait_for(lambda: recorded_rounds(run) >= 1, process, log)
        assert not listening(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143, log.read_text()


@pytest.mark.parametrize(
    ("wrong", "reason"),
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
def test_invalid_settings_of_a_deployment_are_refused_in_one_line(wrong, reason, tmp_path):
    port, run = free_ports(), tmp_path / "run"
    settings = tmp_path / "settings.toml"
    settings.write_text({"key": 'noize = "none()"', "clients": "clients = 5"}.get(wrong, ""))
    bind = wrong if wrong[0] in "0123456789:" else "127.0.0.1"
    if wrong == "ca":
        for name in ("ca.crt", "server.pem"):  # each self-signed
            run_in_folder(CERTIFICATE + name, run / "flower")
    with socket.socket() as taken:
        if wrong == "port":
            taken.bind(("127.0.0.1", port + 2))
            taken.listen()
        with started([DEPLOY, run, settings], tmp_path, PORT=str(port), BIND=bind) as (process, log):
            assert process.wait(PATIENCE) == 2
    (line,) = log.read_text().splitlines()
    assert reason in line
