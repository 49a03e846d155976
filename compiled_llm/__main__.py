"""The `compiled-llm` command."""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run `compiled-llm`, or say what to install for it; the process ends with it."""
    # Processes that libraries start, as multiprocessing does with `python -c`, leave the current folder out, too.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    code = 1  # that of an error which nothing below turns into another
    # Registered first, it runs last.
    atexit.register(lambda: _leave(code))
    # By default Python looks for cycles whenever 700 objects are new, and now and then in all there are. Imports and
    # traces make millions that stay: that is a tenth of a start.
    gc.set_threshold(10_000)
    _let_output_say_all()
    try:
        _set_up_threads()
        _run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        code = _INTERRUPTED
        sys.exit(code)


def _run() -> None:
    if find_spec("typer") is None:
        print("error: this command needs typer: pip install '.[demo]' in the checkout", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    from compiled_llm.commands.app import app

    app()


def _let_output_say_all() -> None:
    """Spell out what a terminal or pipe in ASCII or Latin-1 cannot show, as stderr does, since models say anything."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # else there is none, or it takes any text
        sys.stdout.reconfigure(errors="backslashreplace")


def _set_up_threads() -> None:
    from compiled_llm.commands.openmp import set_up_threads

    set_up_threads()  # torch reads what this sets when it is imported


def _leave(code: int) -> None:
    """End the process, once threads have ended and all else that is registered for its end has run."""
    # Python would take everything apart first: two seconds for what torch has compiled, only to free memory that ends
    # with the process; and from Triton 3.9 on it would print 27 lines about what it cannot take apart.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone
            stream.flush()
    os._exit(code)


def _leave_out_first_folder() -> None:
    """Import nothing more from where Python looks first: the current folder with `-m`, and this one for a script."""
    if sys.path[0] in ("", os.getcwd(), os.path.dirname(os.path.abspath(__file__))):
        del sys.path[0]


def _take_this_package() -> None:
    """Take the package that this file is in, however it was found, and no other one of its name."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("compiled_llm", os.path.join(os.path.dirname(__file__), "__init__.py"))
    assert spec is not None, "it is a file"
    assert spec.loader is not None, "and one of Python"
    package = module_from_spec(spec)
    sys.modules["compiled_llm"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _leave_out_first_folder()
    if not __package__:  # the path of this file was given: a process of our own
        _take_this_package()
    main()
