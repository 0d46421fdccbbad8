"""Load generator of `tok bench server`: a process that sends requests over many connections and does little else.

`python -m tok_server.bench.server.client PORT CONNECTIONS WARM_UP SECONDS RATE BODY`. With RATE 0, each connection
sends its next request as soon as it is answered. Otherwise requests are sent at RATE per second, each over an idle
connection. The process prints "begin" after the warm-up. At the end it prints a `RequestTally` as JSON. Sockets are
polled every `POLL_SECONDS` seconds, which takes little CPU time.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections import deque
from contextlib import suppress

import msgspec

POLL_SECONDS = 0.002  # seconds between polls of the sockets
MAX_READ_BYTES = 1 << 18
BODY_END = b"0\r\n\r\n"  # last bytes of a chunked body; neither JSON nor events end with them
HEAD_END = b"\r\n\r\n"
CONTENT_LENGTH = b"content-length: "


class RequestTally(msgspec.Struct):
    """Counts since the warm-up: requests answered, CPU seconds of this process, wall-clock seconds.

    `failures` counts from the start.
    """

    requests: int = 0
    failures: int = 0
    cpu: float = 0.0
    seconds: float = 0.0


class ClientConnection:
    """One connection: the request it sends, and how much of the answer has arrived."""

    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.status = b""  # status line of the latest answer
        self._request = request
        self._head = self._end = b""
        self._left: int | None = None  # bytes of the body still to come; None for a chunked body

    def send(self) -> None:
        """Send the request. It is short enough for the socket buffer, so the call does not block."""
        self._head = self._end = self.status = b""
        self._left = None
        self.socket.sendall(self._request)

    def read(self) -> bool:
        """Read what has arrived. Returns whether the answer is complete. Errors: OSError if the server has gone."""
        part = self.socket.recv(MAX_READ_BYTES)
        if not part:
            raise ConnectionError("the server closed the connection")
        if not self.status:
            self._head += part
            head, found, part = self._head.partition(HEAD_END)
            if not found:
                return False
            self._begin(head.lower())
        if self._left is not None:
            self._left -= len(part)
            return self._left <= 0
        self._end = (self._end + part)[-len(BODY_END) :]
        return self._end == BODY_END

    def _begin(self, head: bytes) -> None:
        self.status = head.partition(b"\r\n")[0]
        _, found, rest = head.partition(CONTENT_LENGTH)
        if found:
            self._left = int(rest.partition(b"\r\n")[0])


class LoadDriver:
    """Connections that send requests. `rate` is in requests per second; 0 means as many as are answered."""

    def __init__(self, port: int, connections: int, rate: float, body: bytes) -> None:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        request = f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        self.tally = RequestTally()
        self._rate = rate
        self._selector = selectors.DefaultSelector()
        self._idle = deque(ClientConnection(port, request) for _ in range(connections))
        for connection in self._idle:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._began, self._sent = time.monotonic(), 0

    def run(self, seconds: float) -> None:
        """Send requests for `seconds`. Answers still open at the end are read by a later call."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end and self._selector.get_map():
            for _ in range(self._due(now)):
                self._idle.popleft().send()
                self._sent += 1
            for key, _ in self._selector.select(POLL_SECONDS):
                self._read(key.data)
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Close all connections."""
        for key in list(self._selector.get_map().values()):
            key.data.socket.close()
        self._selector.close()

    def _due(self, now: float) -> int:
        """Return how many requests are due and have an idle connection."""
        if not self._rate:
            return len(self._idle)
        return min(len(self._idle), int((now - self._began) * self._rate) - self._sent)

    def _read(self, connection: ClientConnection) -> None:
        try:
            ended = connection.read()
        except OSError:
            self.tally.failures += 1
            self._selector.unregister(connection.socket)
            connection.socket.close()
            return
        if ended:
            self.tally.failures += b" 200 " not in connection.status
            self.tally.requests += 1
            self._idle.append(connection)


def drive(port: int, connections: int, warm_up: float, seconds: float, rate: float, body: bytes) -> RequestTally:
    """Send requests for `warm_up` and then `seconds`, print "begin" in between, and return the counts."""
    driver = LoadDriver(port, connections, rate, body)
    tally = driver.tally
    try:
        driver.run(warm_up)
        tally.requests, began, cpu = 0, time.monotonic(), time.process_time()
        print("begin", flush=True)
        driver.run(seconds)
        tally.cpu, tally.seconds = time.process_time() - cpu, time.monotonic() - began
    finally:
        driver.close()
    return tally


def main(arguments: list[str]) -> None:
    """Run the load of the command line; print "begin" after the warm-up and the tally at the end."""
    port, connections, warm_up, seconds, rate, body = arguments
    tally = drive(int(port), int(connections), float(warm_up), float(seconds), float(rate), body.encode())
    print(msgspec.json.encode(tally).decode(), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):  # the command that started this process reports it
        main(sys.argv[1:])
