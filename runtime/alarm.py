"""alarm: the first failure of any rank, told to all ranks at once.

    rank 1 ──┐  [rank, kind, words]     ┌── rank 1 .. N-1: the same lines
    rank 2 ──┼──> rank 0: a thread for ─┤
    ...    ──┘    each connection       └── its own checks

A rank that fails says why; a rank whose script is over says so. A connection that closes without a message is that of a
rank that was killed: its system closes it at once, or is silent for some seconds if the machine is gone. So no rank
sends heartbeats, and one that computes for long is never taken for dead. A rank that waits asks the others what they
wait for: this distinguishes ranks that compute from ranks that wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import multiprocessing.util
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from traceback import walk_stack
from typing import Any, Literal

from gs_compile.runtime.forks import leave_in_children

log = logging.getLogger(__name__)

LIMIT = 8.0  # seconds for a user's thread to notice a failure: then its process is ended, as other ranks wait for it
MEETING = 60.0  # seconds for all connections
REASON = 4000  # characters of a reason
OF_US = "greedysnake"  # the names of this package's threads begin with it

Kind = Literal["failed", "ended", "asks", "stands"]  # of a line

Exchange = Callable[[Any], list[Any]]  # a collective call that returns every rank's value, by its place


class Alarm:
    """One rank's connection to the first rank; on the first rank, those of all others.

    place: this rank's index in `names`.
    """

    def __init__(self, place: int, names: Sequence[int], exchange: Exchange) -> None:
        self.names = names
        self.failed: tuple[int, str] | None = None  # the rank, and its reason
        self.num_here = 1  # ranks on this machine
        self.on_failure: Callable[[], None] = lambda: None  # called when another rank fails, on a listening thread
        self.ended: dict[int, float] = {}  # ranks whose script is over, and since when (time.monotonic)
        self.standing: dict[int, str] = {}  # the others' answers to `ask`
        self.where: Callable[[int], str] = lambda _: ""  # what this rank waits for together with a given one
        self._place = place
        self._is_noticed = False
        self._is_closed = False
        self._guard = threading.Lock()
        self._sending = threading.Lock()
        self._connections = self._meet(exchange)
        leave_in_children(self)
        _alarms().add(self)
        self._at_end = multiprocessing.util.Finalize(None, self._end, exitpriority=100)  # of one that Python started
        for other, connection in self._connections.items():
            name = f"{OF_US} alarm {other}"
            threading.Thread(target=self._listen, args=(other, connection), name=name, daemon=True).start()

    @property
    def name(self) -> int:
        return self.names[self._place]

    def fail(self, reason: str) -> None:
        """Tell all ranks that this one has failed; of several failures the first counts."""
        if not self._is_closed:
            self._hear(self.name, "failed", reason[:REASON])
            self.notice()

    def notice(self) -> tuple[int, str] | None:
        """The rank that has failed, and why; None: none has. The user's thread is then expected to end by itself."""
        if self.failed is not None and not threading.current_thread().name.startswith(OF_US):
            self._is_noticed = True
        return self.failed

    def wait(self, seconds: float) -> None:
        """Return once it is known that a rank has failed or ended, or after `seconds`."""
        end = time.monotonic() + seconds
        while self.failed is None and not self.ended and time.monotonic() < end:
            time.sleep(0.02)

    def ask(self) -> None:
        """Ask the other ranks what they wait for; `standing` gets the answers, "" for nothing that is known."""
        self.standing = {}
        self._send(self.name, "asks", "")

    def close(self) -> None:
        """This rank has ended without failing, or its failure was told; once is enough."""
        if not self._is_closed:
            if (error := _error_of_child()) is not None:  # it held this rank's model until it was forgotten
                self.fail(in_words(error))
            self._is_closed = True
            self._at_end.cancel()
            self._send(self.name, "ended", "")
            for connection in self._connections.values():
                with contextlib.suppress(OSError):  # the other was faster
                    connection.shutdown(socket.SHUT_WR)

    # Connections -----------------------------------------------------------------------------------------------------

    def _meet(self, exchange: Exchange) -> dict[int, socket.socket]:
        """The connections, by the other's place. The first rank listens until all others have come."""
        machine = f"{socket.gethostname()} {_boot()}"
        machines = exchange(machine)
        self.num_here, is_one_machine = machines.count(machine), len(set(machines)) == 1
        if self._place:
            return {0: self._call(*exchange(None)[0])}
        with _server(len(self.names) + 100, on_loopback=is_one_machine) as server:
            hosts = ["127.0.0.1"] if is_one_machine else _addresses()
            secret = secrets.token_hex(16)
            exchange((hosts, server.getsockname()[1], secret))
            return self._accept(server, secret)

    def _accept(self, server: socket.socket, secret: str) -> dict[int, socket.socket]:
        connections: dict[int, socket.socket] = {}
        end = time.monotonic() + MEETING
        while len(connections) < len(self.names) - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            connection, _ = server.accept()
            connection.settimeout(5)
            try:
                said, place = _line(connection).split()
                if secrets.compare_digest(said, secret) and int(place) not in connections:
                    connection.sendall(b"welcome\n")
                    connections[int(place)] = _kept_alive(connection)
                    continue
            except (OSError, ValueError):  # neither is it one of us
                pass
            connection.close()
        return connections

    def _call(self, hosts: Sequence[str], port: int, secret: str) -> socket.socket:
        errors = []
        for host in hosts:
            with contextlib.ExitStack() as opened:
                try:
                    connection = socket.create_connection((host, port), timeout=MEETING / len(hosts))
                    opened.enter_context(connection)
                    connection.sendall(f"{secret} {self._place}\n".encode())
                    if _line(connection) == "welcome":
                        opened.pop_all()
                        return _kept_alive(connection)
                    errors.append(f"{host}:{port}: another program answers")
                except OSError as error:
                    errors.append(f"{host}:{port}: {error}")
        raise ConnectionError(f"rank {self.names[0]} cannot be reached at {'; '.join(errors)}")

    # Messages --------------------------------------------------------------------------------------------------------

    def _listen(self, other: int, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    self._hear(*json.loads(line))
        except (OSError, ValueError):  # what it was sending as it was killed
            pass
        name = self.names[other]
        if not self._is_closed and name not in self.ended:
            self._hear(name, "failed", "it was killed, or its machine is gone")

    def _hear(self, name: int, kind: Kind, words: Any) -> None:
        """Take note of what a rank says; the first rank tells all others."""
        with self._guard:
            if kind == "ended":
                self.ended = {**self.ended, name: time.monotonic()}  # a new one: others may go through this one
            elif kind == "stands" and words[0] == self.name:
                self.standing = {**self.standing, name: words[1]}
            elif kind == "failed" and self.failed is not None:
                return
            elif kind == "failed":
                self.failed = name, words
        if self._place == 0 or name == self.name:
            self._send(name, kind, words)
        if kind == "asks":
            self._hear(self.name, "stands", (name, self.where(name)))
        if kind == "failed" and name != self.name:
            self.on_failure()
            last = threading.Timer(LIMIT, self._end_process)
            last.name, last.daemon = f"{OF_US} end", True
            last.start()

    def _send(self, name: int, kind: Kind, words: Any) -> None:
        line = json.dumps([name, kind, words]).encode() + b"\n"
        with self._sending:
            for other, connection in self._connections.items():
                if self.names[other] != name:
                    with contextlib.suppress(OSError):  # it is gone, as its own thread will hear
                        connection.sendall(line)

    def leave(self) -> None:
        """A forked child is no rank: it would hold the connections open."""
        if not self._is_closed:
            self._is_closed = True
            for connection in self._connections.values():
                if (fd := connection.detach()) >= 0:
                    os.close(fd)

    def _end(self) -> None:
        """The process ends; an error that ends it ends the other ranks as well."""
        if (error := ending_error()) is not None:
            self.fail(in_words(error))
        self.close()

    def _end_process(self) -> None:
        """The end of a process that has not noticed: its thread computes, waits for data, or for a device."""
        if not self._is_noticed and not self._is_closed and self.failed is not None:
            log.critical("rank %d has failed, so rank %d is ended: %s", self.failed[0], self.name, self.failed[1])
            os._exit(1)


@cache
def _alarms() -> weakref.WeakSet[Alarm]:
    """The alarms of this process. One hook tells all of them of the script's end, as Python cannot remove a hook. It
    runs before `atexit` ends the runs, whose lanes would then fail for another reason.
    """
    alarms: weakref.WeakSet[Alarm] = weakref.WeakSet()

    def end() -> None:
        for each in list(alarms):
            each._end()

    getattr(threading, "_register_atexit", atexit.register)(end)
    return alarms


def ending_error() -> BaseException | None:
    """The error that ends this process; None: it ends without one."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):  # a launcher may have raised it because of an error
        error = error.__context__ if error.code else None
    return error or _error_of_child()


def _error_of_child() -> BaseException | None:
    """What is left of the error of a process that multiprocessing has started, from Python 3.13 on: its exit code."""
    main: Any = BaseProcess
    callers = (frame for frame, _ in walk_stack(sys._getframe()) if frame.f_code is main._bootstrap.__code__)
    code = next((frame.f_locals.get("exitcode") for frame in callers), None)  # None: it has not ended
    return ChildProcessError(f"exit code {code}, which its own output explains") if code else None


def in_words(error: BaseException) -> str:
    """An error's type and message, with escapes for what UTF-8 cannot encode: a path may have surrogates."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text.encode(errors="backslashreplace").decode()


def _server(backlog: int, *, on_loopback: bool) -> socket.socket:
    """A server for calls from this machine alone, or from the network, by IPv6 as well if there is any."""
    if on_loopback:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=both)


def _line(connection: socket.socket) -> str:
    """One line; nothing after its end is read."""
    found = b""
    while not found.endswith(b"\n") and len(found) < 100 and (more := connection.recv(1)):
        found += more
    return found.decode(errors="replace").strip()


def _kept_alive(connection: socket.socket) -> socket.socket:
    """A connection that ends, at the latest, 8 seconds after the other machine has."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 2),  # seconds of silence
        (socket.TCP_KEEPINTVL, 2),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 8000),  # milliseconds, for what was sent
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def _boot() -> str:
    """What distinguishes this machine from others of the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _addresses() -> list[str]:
    """Where others may reach this machine: where they met, its name, the address of its default route."""
    addresses = [os.environ.get("MASTER_ADDR", ""), socket.getfqdn(), socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # nothing is sent
            addresses.append(probe.getsockname()[0])
        except OSError:
            pass
    return list(dict.fromkeys(filter(None, addresses)))
