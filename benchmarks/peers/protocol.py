"""The child's end of the protocol that rollyard/bench/peer.py describes. Knows no library, so that every peer can use it."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

Handler = Callable[..., dict[str, Any]]


class Channel:
    """Messages in, answers out. Standard output is kept for answers: what libraries print there goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        sys.excepthook = self._fail

    def receive(self) -> dict[str, Any]:
        """Wait for the next message."""
        return self._messages.get()

    def send(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def end(self, code: int = 0) -> NoReturn:
        """End the process without unwinding: the listening thread would be torn out of its read, which aborts."""
        sys.stderr.flush()
        os._exit(code)

    def _fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
        """What nobody caught ends the peer: the cause to the parent, all of it to the log."""
        traceback.print_exception(kind, error, trace)
        self.send({"error": f"{kind.__name__}: {error}"})
        self.end(1)

    def _listen(self) -> None:
        """On a thread of its own, so that the end of the parent is seen while a workload runs."""
        for line in sys.stdin.buffer:
            self._messages.put(json.loads(line))
        if os.getpgrp() == os.getpid():  # with whatever processes a library started
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


def serve(channel: Channel, handlers: dict[str, Handler]) -> NoReturn:
    """Answer messages until `quit`. A handler that fails ends the peer."""
    while (message := channel.receive()).get("do") != "quit":
        handler = handlers.get(message.pop("do"))
        channel.send(handler(**message) if handler else {"error": "this peer does not know that message"})
    channel.end()
