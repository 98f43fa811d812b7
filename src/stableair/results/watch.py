"""Local web server that shows the report about runs; the page reloads after each new round."""

import hashlib
import html
import os
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from stableair.errors import InputError, ResourceError, StableairError
from stableair.results.checksums import ROUNDS
from stableair.results.reading import find
from stableair.results.report import page
from stableair.validation import as_path, integer, typed

HOST = "127.0.0.1"
POLLING_SECONDS = 2  # interval at which the page asks the server for new rounds
RELOAD = """<script>
const shown = "{version}";
setInterval(async () => {{
  try {{ if (await (await fetch("/version")).text() !== shown) location.reload(); }} catch {{}}
}}, {milliseconds});
</script>"""
WAITING = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>stableair: waiting</title></head>
<body style="font-family: sans-serif; margin: 3em"><h1>No complete round yet</h1><p>{reason}</p></body></html>"""


class RunPage:
    """The report about the runs in some folders, which is rendered again only after a new round.

    Args:
        folders: Run folders, or folders that contain run folders. New runs may appear in them.
    """

    def __init__(self, folders: Sequence[Path]):
        self.folders = folders
        self.lock = Lock()
        self.rendered = ("", "")  # version and HTML of the last rendering

    def version(self) -> str:
        """Return a string that changes whenever a round is recorded or a run appears."""
        state = hashlib.sha256()
        for folder in self.folders:
            for path in sorted(folder.rglob(ROUNDS)):
                try:
                    file = os.stat(path)
                except OSError:  # the file has just been removed
                    continue
                state.update(f"{path} {file.st_mtime_ns} {file.st_size}\n".encode())
        return state.hexdigest()[:16]

    def text(self) -> str:
        """Return the page as HTML; render it first if there is a new round."""
        with self.lock:
            version = self.version()
            if version != self.rendered[0]:
                self.rendered = version, self._render(version)
            return self.rendered[1]

    def _render(self, version: str) -> str:
        try:
            text = page(*find(self.folders))
        except StableairError as error:
            text = WAITING.format(reason=html.escape(error.message))
        script = RELOAD.format(version=version, milliseconds=1000 * POLLING_SECONDS)
        before, end, after = text.rpartition("</body>")
        return f"{before}{script}{end}{after}"


@typed
def watch(folders: str | Path | Sequence[str | Path], port: int = 8000) -> ThreadingHTTPServer:
    """Create a local web server that shows the report about runs. `stableair watch` runs this server.

    The page in the browser reloads whenever a run has a new round. The server accepts connections from this machine
    only.

    Args:
        folders: One or more run folders, or folders that contain run folders.
        port: Port of the server. 0: any free port.

    Returns:
        The server. `serve_forever()` answers requests, `server_port` is the port, and `server_close()` frees the port.

    Raises:
        InputError: A folder does not exist (`no-folder`), or the port is invalid.
        ResourceError: Another program uses the port (`port-busy`).

    >>> from tempfile import TemporaryDirectory
    >>> import stableair as sa
    >>> with TemporaryDirectory() as folder, sa.watch(folder, port=0) as server:
    ...     print(server.server_address[0])
    127.0.0.1
    """
    integer("port", port, 0, 65535)
    paths = [as_path("folder", folder) for folder in ([folders] if isinstance(folders, str | Path) else folders)]
    if missing := [path for path in paths if not path.is_dir()]:
        raise InputError(f"{missing[0]}: there is no such folder", code="no-folder", folder=missing[0])
    try:
        return _Server((HOST, port), RunPage(paths))
    except OSError as error:
        text = f"port {port} of {HOST} cannot be used: {error.strerror}; choose another --port"
        raise ResourceError(text, code="port-busy", port=port) from None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # on Windows it would allow two servers on one port

    def __init__(self, address: tuple[str, int], runs: RunPage):
        self.runs = runs
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if urlsplit(f"//{self.headers.get('Host', '')}").hostname not in (HOST, "localhost"):
            self.send_error(403)  # DNS rebinding: the page of another site
        elif self.path == "/":
            self._answer(self.server.runs.text(), "text/html")
        elif self.path == "/version":
            self._answer(self.server.runs.version(), "text/plain")
        else:
            self.send_error(404)

    def _answer(self, text: str, kind: str) -> None:
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""
