"""What every command shares: exit codes, one-line errors, ``--json`` errors, ``--debug``, Ctrl-C, closed pipes."""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING

import typer

import espalier_format.cli.conformance_command
import espalier_format.cli.hub_commands
import espalier_format.cli.quantize_command  # noqa: F401 - all three register their commands
from espalier_format.cli.app import PROGRAM, app
from espalier_format.cli.terminal import drop_stream, print_error, print_json, print_traceback, use_safe_streams
from espalier_format.cli.usage import PlainUsageCommand
from espalier_format.errors import EspalierError, UsageError, WriteError
from espalier_format.operations.error_document import error_document

if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE: what a shell reports for any filter whose reader went away


class UnexpectedError(EspalierError):
    """Stands for an exception that nobody raised on purpose; only the command line makes one."""

    code = "internal"

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause} (run with --debug for the traceback)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    ``arguments`` are those after the program's name; ``sys.argv`` when None. Codes: 0 fine, 1 readable but wrong,
    2 refused, bad usage or an unexpected exception, 130 Ctrl-C, 141 the reader of the output went away
    (spec/errors.md). An error is one line on stderr, or with ``--json`` one document on stdout; ``--debug`` adds
    the traceback on stderr.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in options
    as_json = "--json" in options
    remaining = [word for word in options if word != "--debug"] + words[len(options) :]
    use_safe_streams()
    try:
        code = _run(remaining or ["--help"])
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        drop_stream(sys.stdout)
        return EXIT_CLOSED_PIPE
    except OSError as error:
        # The library words every other failure to write itself. A command prints at its end: what is lost is the
        # report, and not what it is about.
        if isinstance(error, EspalierError) or error.errno not in _NO_ROOM:
            return _report_any(error, debug=debug, as_json=as_json)
        drop_stream(sys.stdout)
        reason = error.strerror or str(error)
        lost = WriteError(f"cannot write the report to standard output: {reason}; the work itself is done")
        return _report(lost, as_json=False)
    except Exception as error:  # noqa: BLE001 - the last resort: a person gets one line, not a traceback
        return _report_any(error, debug=debug, as_json=as_json)
    return code


def _report_any(error: Exception, *, debug: bool, as_json: bool) -> int:
    if debug:
        print_traceback(error)
    known = error if isinstance(error, EspalierError) else UnexpectedError(error)
    return _report(known, as_json=as_json)


def _run(arguments: list[str]) -> int:
    for registered in app.registered_commands:
        registered.cls = PlainUsageCommand
    command = typer.main.get_command(app)
    try:
        with command.make_context(PROGRAM, arguments) as context:
            result: object = command.invoke(context)
    except typer.Exit as request:
        return request.exit_code
    except typer.TyperException as error:
        raise UsageError(_usage_message(error)) from error
    return result if isinstance(result, int) else 0


def _usage_message(error: BaseException) -> str:
    text = str(error.format_message()) if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else PROGRAM
    # Some releases of typer validate choices with pydantic, whose prefix says nothing to a person.
    text = text.replace("Value error, ", "").rstrip(".")
    return f"{text} (see `{path} --help`)"


def _report(error: EspalierError, *, as_json: bool) -> int:
    try:
        if as_json:
            print_json({"error": error_document(error)})
        else:
            print_error(error.code, str(error))
        sys.stdout.flush()
    except OSError:  # nobody is left to tell, or the disk behind stdout is full
        drop_stream(sys.stdout)
    return error.exit_code
