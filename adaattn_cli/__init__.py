"""The command `adaattn`, a package of its own: it answers at once, and imports `adaattn_hf` when a command runs."""

import contextlib
import signal
import sys
import threading
from types import FrameType
from typing import Any


def main() -> None:
    """Run the command line; exits the process with the command's code, 130 where Ctrl-C came before there was one."""
    try:
        # a program under `run` has Python's own, which asyncio asks for
        if sys.argv[1:2] != ["run"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGINT, interrupt)
                sys.unraisablehook = unraisable
        from .app import run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, from a finalizer as soon as it is over: there Python would print it and go on."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") == "weakref":
            _again(number)
            return
        frame = frame.f_back
    raise KeyboardInterrupt(number)


def unraisable(what: Any) -> None:
    """Sends again a signal that came in a function called where nothing can be raised, such as a weak reference's."""
    if isinstance(what.exc_value, KeyboardInterrupt):
        _again(*what.exc_value.args or (signal.SIGINT,))
    else:
        sys.__unraisablehook__(what)


def _again(number: int) -> None:
    """Sends a signal until it is heard: one that comes just before the main thread begins to wait ends no wait."""
    before, heard = signal.getsignal(number), threading.Event()
    # to the main thread itself, which may sleep or wait for a process by then; Windows has no such call
    send = getattr(signal, "pthread_kill", lambda _, again: signal.raise_signal(again))

    def hear(*_: Any) -> None:
        heard.set()
        signal.signal(number, before)
        signal.raise_signal(number)

    def insist() -> None:
        while not heard.wait(0.01) and signal.getsignal(number) is hear:
            send(threading.main_thread().ident, number)

    signal.signal(number, hear)
    threading.Thread(target=insist, daemon=True).start()
