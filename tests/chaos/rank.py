"""A process of `runner.World`: runs the programs that it is told, one after the other.

Lines of JSON come on stdin and go to what was stdout; whatever else prints goes to stderr. SIGUSR1 writes the
stacks of all threads there.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any, TextIO


class Parent:
    """The way back to the parent; any thread may use it."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def say(self, **message: Any) -> None:
        """Send one message."""
        with self._lock:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()


def main() -> None:
    """Serve until stdin ends."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = Parent()
    import torch

    from tests.chaos import programs

    torch.set_num_threads(1)
    here = programs.Here(parent.say)
    parent.say(said="ready")
    for line in sys.stdin:
        task = json.loads(line)
        try:
            parent.say(done=getattr(programs, task["program"])(here, **task["parameters"]))
        except BaseException as error:
            parent.say(raised=type(error).__name__, text=str(error), trace=traceback.format_exc())
    os._exit(0)


if __name__ == "__main__":
    main()
