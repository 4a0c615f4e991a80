"""An end for answers that have none."""

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TooSlowError(BaseException):
    """A block has run for longer than it may. Not an Exception: an answer's `except Exception` must not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlowError in a block that runs for longer; again every second, should an `except:` catch it.

    Only the main thread can be interrupted; elsewhere there is no limit. Windows has no timer signal: there the block
    ends at its next line of Python, which a wait inside of C code puts off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
    elif hasattr(signal, "setitimer"):
        yield from _by_signal(seconds)
    else:
        yield from _by_thread(seconds)


def _by_signal(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlowError(f"no end after {seconds:g} s")

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def _by_thread(seconds: float) -> Iterator[None]:
    over, late = threading.Event(), threading.Event()

    def watch() -> None:
        wait = seconds
        while not over.wait(wait):
            late.set()
            _thread.interrupt_main()
            wait = 1.0

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt as error:
        if not late.is_set():
            raise
        raise TooSlowError(f"no end after {seconds:g} s").with_traceback(error.__traceback__) from None
    finally:
        over.set()
