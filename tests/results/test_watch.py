"""The page of `stableair watch` about runs in progress."""

import os
import re
import signal
import socket
import time
from contextlib import contextmanager
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import stableair as sa
from helpers.errors import refused
from helpers.sweeps import start_command, wait_until


@contextmanager
def served(*folders):
    with sa.watch(folders, port=0) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield lambda path="/", **headers: fetch(server.server_port, path, headers)
        finally:
            server.shutdown()


def fetch(port, path, headers):
    with urlopen(Request(f"http://127.0.0.1:{port}{path}", headers=headers), timeout=20) as answer:
        return answer.read().decode()


def test_the_page_follows_the_runs(tiny, tmp_path):
    with served(tmp_path) as get:
        assert "contains no run" in get()
        sa.run(tiny.with_(rounds=1), tmp_path / "a")
        first, page = get("/version"), get()
        assert f'const shown = "{first}"' in page
        assert "1 run, 1 method" in page
        assert get() == page
        sa.run(tiny, tmp_path / "a", resume=True)
        assert get("/version") != first
        sa.run(tiny.with_(receiver="none()"), tmp_path / "b")
        assert "2 runs, 2 methods" in get()


def test_a_page_that_did_not_change_is_not_rendered_again(tiny, tmp_path, monkeypatch):
    sa.run(tiny, tmp_path)
    with served(tmp_path) as get:
        page = get()
        monkeypatch.setattr("stableair.results.watch.page", lambda *_: pytest.fail("rendered again"))
        assert get() == page


def test_only_requests_from_this_machine_are_served(tmp_path):
    with sa.watch([tmp_path], port=0) as server:
        assert server.server_address[0] == "127.0.0.1"
    with served(tmp_path) as get:
        get(Host="localhost:1")
        for path, host, code in (
            ("/", "evil.example", 403),
            ("/version", "evil.example", 403),
            ("/x", "localhost", 404),
        ):
            with pytest.raises(HTTPError) as error:
                get(path, Host=host)
            assert error.value.code == code


def test_bad_input_is_refused(tmp_path):
    refused("no-folder", sa.watch, [tmp_path / "missing"])
    refused("out-of-range", sa.watch, [tmp_path], -1)
    refused("out-of-range", sa.watch, [tmp_path], 65536)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(sa.ResourceError) as error:
            sa.watch([tmp_path], busy.getsockname()[1])
    assert (error.value.code, "\n" in str(error.value)) == ("port-busy", False)


def test_ctrl_c_ends_the_command_with_one_line(tmp_path):
    with start_command("watch", tmp_path, "--port", 0) as process:
        line = process.stdout.readline()
        port = int(re.search(r"http://127.0.0.1:(\d+) ", line)[1])
        wait_until(lambda: "No complete round" in fetch(port, "/", {}))
        os.kill(process.pid, signal.SIGINT)
        started = time.monotonic()
        out, errors = process.communicate(timeout=20)
    assert (process.returncode, out, errors) == (130, "", "stopped; the runs continue\n")
    assert time.monotonic() - started < 10
