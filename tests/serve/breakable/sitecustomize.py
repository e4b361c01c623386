"""For processes with this folder on their PYTHONPATH: SIGUSR2 makes the engine in them contradict itself at its next step.

Python imports this module by its name when it starts. The product knows nothing of it.
"""

from __future__ import annotations

import signal
import sys
import threading


def _contradict(*_):
    raise AssertionError("the books were broken by a test")


def _wait_and_break():
    signal.sigwait({signal.SIGUSR2})
    sys.modules["replicas.engine.engine"].NativeEngine.step_once = _contradict


# Blocked in the main thread and so in all that it starts: only this one takes it.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
threading.Thread(target=_wait_and_break, daemon=True).start()
