"""An HTTP server for OpenAI's API over one model: chat completions, completions and models.

It is for one user on this machine: requests are answered one after the other, without batches of several.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from torch import nn

from te_models.data.tokenizer_base import Tokenizer
from te_models.errors import TeModelsError, UsageError, plural
from te_models.files.atomic import first_line
from te_models.files.formats import Fields, parse_json
from te_models.generation.completions import Completions, Ended, UnknownModel

HOST = "127.0.0.1"
PORT = 8000
MAX_BODY = 2**24  # bytes of a request
CLOSING_SECONDS = 5.0  # that a server waits for the threads of its connections to end
ROUTES = {"/v1/chat/completions": True, "/v1/completions": False}  # path -> whether it is a chat


class Server(ThreadingHTTPServer):
    """The server; `serve_forever` answers until another thread calls `shutdown`.

    Args:
        completions: answers the requests.
        host: the address to listen on.
        port: the port; 0: a free one.
        note: called with a line about each request that the model has answered.

    Raises:
        UsageError: the port is in use, or the address is not this machine's.
    """

    def __init__(
        self,
        completions: Completions,
        host: str = HOST,
        port: int = PORT,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.completions = completions
        self.note = note
        self._connections: list[tuple[threading.Thread, socket.socket]] = []
        # An address of IPv6, which needs another kind of socket.
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port} ({error.strerror or error}): give another --port or --host"
            ) from None

    def handle_error(self, request: object, client_address: object) -> None:
        """Note an error of a connection in one line; the base class writes a traceback."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, (ConnectionError, TimeoutError)):
            self.note(f"a request failed: {type(error).__name__}: {first_line(error)}")

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a connection in a thread of its own."""
        # A daemon: a connection that a client keeps open must not keep the program from ending.
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), daemon=True
        )
        alive = [connection for connection in self._connections if connection[0].is_alive()]
        self._connections = [*alive, (thread, request)]
        thread.start()

    def server_close(self) -> None:
        """Close the socket, end the answer that is being made, and close the connections."""
        super().server_close()
        self.completions.end()
        for _, connection in self._connections:
            # The client may have closed it.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        # A thread that still frees tensors while Python ends would abort the process.
        deadline = time.monotonic() + CLOSING_SECONDS
        for thread, _ in self._connections:
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def url(self) -> str:
        """The address that clients take as base_url."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/v1"


def make_server(
    model: nn.Module,
    tokenizer: Tokenizer,
    name: str = "te-models",
    host: str = HOST,
    port: int = PORT,
    note: Callable[[str], None] = lambda line: None,
) -> Server:
    """Return a server of `model` by `name`, which listens; see `Server`."""
    return Server(Completions(model, tokenizer, name), host, port, note)


def is_local(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds without a byte, after which the connection ends

    @property
    def served(self) -> Server:
        """The server of the connection."""
        assert isinstance(self.server, Server)
        return self.server

    def log_message(self, format: str, *args: object) -> None:
        """Leave out the line that the base class writes of each request."""

    def do_GET(self) -> None:
        """Answer a request for the models, or for whether the server is up."""
        completions = self.served.completions
        # Clients escape what a path cannot hold, such as a space or a slash in the model's name.
        path = unquote(self.path.partition("?")[0].rstrip("/"))
        if not self._from_here():
            return
        # The paths of OpenAI's API, and the one that load balancers ask.
        if path == "/v1/models":
            self._send(completions.models())
        elif path == f"/v1/models/{completions.name}":
            self._send(completions.about())
        elif path == "/health":
            self._send({})
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is nothing at {self.path[:100]}")

    def do_POST(self) -> None:
        """Answer a request for a completion."""
        path = self.path.partition("?")[0].rstrip("/")
        # Read the body before any answer: what is left of it would be taken for the next request of the connection.
        body = self._body()
        if body is None or not self._from_here():
            return
        if path not in ROUTES:
            paths = " and ".join(ROUTES)
            self._refuse(
                HTTPStatus.NOT_FOUND, f"there is nothing at {self.path[:100]}: try {paths}"
            )
            return
        begun = time.monotonic()
        try:
            fields = parse_json(body, "the request", UsageError)
            if not isinstance(fields, dict):
                raise UsageError("the request is no JSON object: give one")
            request = self.served.completions.read(fields, chat=ROUTES[path])
            if request.stream:
                self._stream(self.served.completions.pieces(request), request.usage, begun)
            else:
                answer = self.served.completions.whole(request)
                self._note_answer(answer["usage"], begun)
                self._send(answer)
        except UnknownModel as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error), "model_not_found")
        except (TeModelsError, ValueError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except ConnectionError:  # the client has gone
            self.close_connection = True
        except Ended as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error), "stopped")
        except RuntimeError as error:  # such as a lack of memory
            self.served.note(f"{path} failed: {first_line(error)}")
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, first_line(error))

    def _note_answer(self, used: dict[str, int], begun: float) -> None:
        """Note an answer that is about to end: once a client has all of it, it may end the server."""
        path = self.path.partition("?")[0].rstrip("/")
        tokens = plural(used.get("completion_tokens", 0), "token")
        seconds = time.monotonic() - begun
        self.served.note(f"{path}: {tokens} in {seconds:.1f} s")

    def _stream(self, pieces: Generator[Fields, None, None], usage: bool, begun: float) -> None:
        """Send the pieces of an answer as server-sent events; `begun` is when the request came."""
        used: dict[str, int] = {}
        with contextlib.closing(pieces):
            first = next(pieces)  # a mistake in the request is found here, before anything is sent
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Cache-Control", "no-cache")
            # The length is not known yet: each event is a chunk, and an empty chunk ends the body.
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._event(json.dumps(first))
            try:
                for piece in pieces:
                    used = piece.get("usage", used)
                    if "usage" not in piece or usage:
                        self._event(json.dumps(piece))
            except (TeModelsError, RuntimeError) as error:  # too late for another status
                self._event(json.dumps(_error(str(error), "server_error")))
            self._note_answer(used, begun)
            self._event("[DONE]", end=b"0\r\n\r\n")  # in one write: clients leave after this event

    def _event(self, data: str, end: bytes = b"") -> None:
        """Send one event as a chunk of the body; `end` ends the body."""
        event = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n" + end)
        self.wfile.flush()

    def _body(self) -> bytes | None:
        """Return the body of a request; None once it has been refused."""
        length = self.headers.get("Content-Length", "")
        kind = self.headers.get_content_type()
        self.close_connection = True  # unless the body is read
        if not length.isdecimal():
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the request has no Content-Length: give one")
        elif int(length) > MAX_BODY:
            size = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            self._refuse(size, f"the request is larger than {MAX_BODY:,} bytes: make it shorter")
        elif kind != "application/json":  # which a page of another site cannot send
            wrong = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
            self._refuse(wrong, f"the request is {kind}: send JSON, Content-Type: application/json")
        else:
            body = self.rfile.read(int(length))
            # The whole body is read: the connection may carry another request, unless the client asks to end it.
            self.close_connection = self.headers.get("Connection", "").lower() == "close"
            return body
        return None

    def _from_here(self) -> bool:
        """Return whether a request to a local server names this machine, else refuse it.

        A page of another site that points its own name at 127.0.0.1 could otherwise read the answers.
        """
        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        if not is_local(str(self.served.server_address[0])) or is_local(host):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, f"this server is for this machine, not for {host[:100]}")
        return False

    def _send(self, content: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Send JSON."""
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, line: str, code: str | None = None) -> None:
        """Send an error as OpenAI's API does."""
        # The client may have gone in the meantime.
        with contextlib.suppress(ConnectionError):
            self._send(_error(line, "invalid_request_error", code), status)


def _error(line: str, kind: str, code: str | None = None) -> Fields:
    return {"error": {"message": line, "type": kind, "param": None, "code": code}}
