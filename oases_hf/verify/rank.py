"""One rank of a verification, as a process."""

from __future__ import annotations

from datetime import timedelta

from ..joining import device_of_rank, process_group, silence_libraries
from ..launching import FAIL, PASS, Seat
from .settings import Settings
from .subject import Subject
from .verification import verify


def run_rank(settings: Settings, seat: Seat) -> int:
    """Verify as one of the ranks; the first prints the report.

    Returns:
        The exit code.

    Raises:
        ConfigError: settings, ranks and model do not go together.
        UnsupportedModelError: the model cannot be sharded.
    """
    silence_libraries()
    subject, device = Subject.load(settings), device_of_rank(settings.device)  # what is wrong shows before ranks meet
    with process_group(device, timedelta(seconds=settings.time_limit_s), seat):
        report = verify(subject, device, lambda line: print(line, flush=True))
    return PASS if report.ok else FAIL
