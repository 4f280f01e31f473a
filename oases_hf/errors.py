"""Errors of the package. Every message says where, what, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager


class OasesError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(OasesError, ValueError):
    """A setting, or a combination of settings, cannot work; raised before weights move where possible."""


@contextmanager
def naming(what: str, advice: str = "") -> Iterator[None]:
    """Say what could not be read: errors of its file and of its content become ConfigError of that."""
    try:
        yield
    except (OSError, ConfigError) as error:
        raise ConfigError(f"{what}: {error}" + (f"; {advice}" if advice else "")) from error


class UnsupportedModelError(OasesError):
    """The model is of a kind that cannot be sharded or scheduled."""


class ScheduleError(OasesError):
    """A schedule would compute something wrong, or failed while it ran."""


class BackwardError(OasesError, RuntimeError):
    """Autograd was asked for something the overlapped executor does not do."""


class DistributedError(OasesError, RuntimeError):
    """The ranks disagree: a rank is missing from a collective step, or sees other data."""


class CheckpointError(OasesError):
    """A checkpoint cannot be written or read."""
