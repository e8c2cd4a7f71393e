"""A page that follows runs while they train: a server on this machine for its own browsers only."""

import contextlib
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fedjax_mr.errors import UserError

HOST = "127.0.0.1"
CONTENT = "/content.json"

Content = Callable[[], dict[str, Any]]


def serve(content: Content, page: Callable[[dict[str, Any]], str]) -> None:
    """Print the address of the page, and serve it until Ctrl-C.

    Args:
      content: makes the content anew, at each request.
      page: the text of the page with some content.
    """
    with server_of(content, page) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"http://{HOST}:{server.server_port} shows the runs while they train (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def server_of(content: Content, page: Callable[[dict[str, Any]], str]) -> ThreadingHTTPServer:
    """The server, on a free port. It answers ``/`` and `CONTENT`, which the page asks for every few seconds."""

    def now() -> dict[str, Any]:
        try:
            return content() | {"live": CONTENT}
        except UserError as reason:  # a run without an evaluation, or a file that is being written
            return EMPTY | {"verdict": [str(reason)], "live": CONTENT}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host") != f"{HOST}:{server.server_port}":
                self.send_error(403)  # a page of another host, whose name was made to point to this machine
            elif self.path == "/":
                self._answer("text/html; charset=utf-8", page(now()))
            elif self.path == CONTENT:
                self._answer("application/json", as_json(now()))
            else:
                self.send_error(404)

        def _answer(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the browser has left
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Print nothing: the page asks again and again."""

    server = ThreadingHTTPServer((HOST, 0), Handler)
    return server


EMPTY: dict[str, Any] = {
    "title": "waiting", "made": "", "verdict": [], "notes": [], "curves": [], "tables": [], "clients": [], "bars": [],
    "links": [], "matrices": [], "pictures": [],
}  # fmt: skip


def as_json(content: dict[str, Any]) -> str:
    """The content as JSON."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))
