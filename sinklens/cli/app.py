"""The command line: each command is a function, whose signature and docstring are its options and their help.

A command is imported when it is called, so ``sinklens --help`` imports nothing but this file.

Exit codes: 0 success; 1 an error explained by the message; 2 a command line that cannot be parsed, with an unknown or
missing option or a value of the wrong form; 130 interrupted. Files are written atomically: an interrupted command
leaves no partial file.

Pitfall: an option without a default in the signature shows none in ``--help``; its docstring says what applies.
"""

import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

from cyclopts import App, CycloptsError, Parameter

from sinklens.errors import SinklensError
from sinklens.utils.escaping import say, spelled
from sinklens.utils.versions import version_of

COMMANDS = {  # name -> the function or the App that it calls, and what `sinklens --help` says of it
    "demo": (
        "models:demo",
        "trace the shipped models on a held-out problem: watch the answer fill in and the sinks move",
    ),
    "trace": ("tracing:trace", "run a model on a prompt; write the answer, the sink track, a figure and a report"),
    "lab": (
        "models:lab",
        "open a live lab in the browser: run the model, change the run by pointing, compare, copy as Python",
    ),
    "analyse": (
        "studies:analyse",
        "run a study on one or several models; print its tables; write tables, figures and a manifest",
    ),
    "test": ("testing:run_plan", "test one claim by a plan that is stored beforehand; print whether it holds"),
    "evaluate": (
        "evaluation:evaluate",
        "measure the accuracy of models on a task, unmasked and with sinks masked; finished samples are skipped",
    ),
    "reproduce": (
        "reproducing:reproduce",
        "repeat the study of attention sinks, arXiv 2510.15731: its tables and figures beside ours, on one page",
    ),
    "plan": (
        "planning:plan",
        "print what a run takes, from config.json alone: memory by part, time on named cards, which cards hold it",
    ),
    "verify": (
        "tracing:verify",
        "check a checkpoint that you have: fingerprint, self-check, accuracy, the study's statements; write a "
        "report to paste",
    ),
    "protocols": (
        "protocols:protocols",
        "list the protocols: settings of published scores, with the scores and their sources",
    ),
    "score": (
        "results:score",
        "run the programs that models wrote, each in isolation, and record whether they are right",
    ),
    "merge": (
        "results:merge",
        "copy the records of evaluations, such as those of several machines, into one folder; rerun to resume",
    ),
    "lm-eval": (
        "results:lm_eval",
        "run lm-evaluation-harness, which then knows --model sinklens; every option is the harness's",
    ),
    "export": (
        "results:export",
        "write every record of an evaluation, with the run that it belongs to, as a line of JSON",
    ),
    "table": (
        "results:table",
        "print the tables of results from `sinklens evaluate` or `sinklens analyse`, with intervals",
    ),
    "hooks": ("models:hooks", "list the hook points of a model, with shapes, without loading its weights"),
    "fetch": ("models:fetch", "download the weights of smollm2-135m, a model of 135 million parameters, once"),
    "models": ("models:models", "list the models that can be loaded, and how far each family was verified"),
}


def build() -> App:
    """The command line; a flag has no ``--no-`` form unless its option says so."""
    app = App(
        name="sinklens", version=f"sinklens {version_of('sinklens')}", help_format="plaintext",
        help="Look inside diffusion language models while they denoise.",
        help_epilogue="From Python: sinklens.load, sinklens.trace, sinklens.generate.",
        default_parameter=Parameter(negative=(), consume_multiple=1),
        result_action="return_value", suppress_keyboard_interrupt=False,
    )  # fmt: skip
    for name, (place, text) in COMMANDS.items():
        app.command(f"sinklens.cli.{place}", name=name, help=text)
    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are printed."""
    call = sys.argv[1:] if arguments is None else list(arguments)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack characters of an answer
    formatted, warnings.formatwarning = warnings.formatwarning, _warning
    try:
        command, bound, unparsed = build().parse_args(call, exit_on_error=False, print_error=False)
        command(*bound.args, **bound.kwargs, **dict.fromkeys(unparsed, call))
        sys.stdout.flush()
    except CycloptsError as error:
        say(
            *f"sinklens: {error}".split("\n"),
            "`sinklens --help` lists the commands, `sinklens COMMAND --help` the options of one.",
            to=sys.stderr,
        )
        return 2
    except SinklensError as error:
        say(f"sinklens: {error}", to=sys.stderr)
        return 1
    except OSError as error:  # results have their own errors, so this is from the output or a connection
        with suppress(OSError):  # it may be redirected within Python
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        if isinstance(error, BrokenPipeError):  # `sinklens demo | head`: all files are written before printing
            return 0
        say(f"sinklens: {error}.", to=sys.stderr)
        return 1
    finally:
        warnings.formatwarning = formatted
    return 0


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:  # fmt: skip
    """A warning as a line; it may quote a name from a file."""
    return spelled(f"{filename}:{lineno}: {category.__name__}: {message}") + "\n"
