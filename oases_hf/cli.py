"""The command ``oases-hf``. Torch is imported when a command needs it, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .commands import doctor, estimate, merge, plan, profile, simulate
from .verify import command as verify


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        name: as it is typed.
        summary: one line for ``--help``.
        add_options: gives a parser its options.
        run: does it, from the parsed options and the command line they are of; returns the exit code.
    """

    name: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Sequence[str]], int]


COMMANDS = (
    Command("profile", profile.SUMMARY, profile.add_options, profile.run),
    Command("plan", plan.SUMMARY, plan.add_options, plan.run),
    Command("simulate", simulate.SUMMARY, simulate.add_options, simulate.run),
    Command("estimate", estimate.SUMMARY, estimate.add_options, estimate.run),
    Command("merge", merge.SUMMARY, merge.add_options, merge.run),
    Command("doctor", doctor.SUMMARY, doctor.add_options, doctor.run),
    Command("verify", verify.SUMMARY, verify.add_options, verify.run),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments``, those of the process by default; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("oases-hf", description="Overlapped tensor model parallelism for Hugging Face.")
    chosen = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = chosen.add_parser(command.name, help=command.summary)
        command.add_options(sub)
        sub.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options, arguments)
    except OSError as error:  # what is to be written cannot be
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
