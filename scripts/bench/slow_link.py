"""Time all contenders on CPU ranks behind slow links that this makes itself: no GPU is needed, but Linux and root.

    python scripts/bench/slow_link.py --json rows.json --png rows.png
    python scripts/bench/slow_link.py --ranks 2 --mbit-per-s 500 --rounds 3 --schedules megatron,oases --peers hf

Every rank has a network namespace, and a link of that rate in both directions. What else is on the command line goes
to scripts/bench/schedules.py, which runs on the ranks, with all schedules and peers unless told. Times are worth
something where nothing else runs; ranks on a core each want as many cores as there are ranks.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from oases_hf.errors import ConfigError
from oases_hf.launching import USAGE, run_ranks
from scripts.bench import schedules
from scripts.bench.contenders import PEERS
from scripts.bench.links import Links, links
from scripts.bench.rows import Row, plot, read_json, write_json

INTERRUPTED = 130


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ``rest`` is what schedules.py gets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", default="2,4", help="how many, each (default: 2,4)")
    add("--mbit-per-s", default="1000,500", help="rates of the links, each (default: 1000,500)")
    add("--time-limit-s", type=float, default=1800.0, help="of each of these (default: 1800)")
    add("--json", type=Path, help="write the rows to this file")
    add("--png", type=Path, help="draw the rows")
    options, rest = parser.parse_known_args(argv)
    options.rest = [f"--peers={','.join(PEERS)}", *rest]
    schedules.parse_options(options.rest)
    try:
        options.ranks, options.mbit_per_s = (
            [int(number) for number in text.split(",")] for text in (options.ranks, options.mbit_per_s)
        )
    except ValueError:
        parser.error("--ranks and --mbit-per-s: give whole numbers, with commas between them")
    if min(options.ranks) < 2 or min(options.mbit_per_s) < 1:
        parser.error("a link joins --ranks 2 or more, at --mbit-per-s 1 or more")
    return options


def measure(made: Links, options: argparse.Namespace) -> tuple[int, list[Row]]:
    """Run the contenders on linked ranks; returns the exit code, and the rows when it is 0."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        script = ["env", "ACCELERATE_USE_CPU=true", sys.executable, schedules.__file__, *options.rest, f"--json={file}"]
        code = run_ranks("slow_link", made.command(script), made.ranks, options.time_limit_s)
        return code, [] if code else read_json(file)


def run(options: argparse.Namespace) -> int:
    """Measure with every number of ranks and every rate; returns the first exit code that is not 0."""
    rows: list[Row] = []
    for ranks in options.ranks:
        for rate in options.mbit_per_s:
            setting = f"{ranks} ranks, {rate} Mbit/s"
            print(f"== {setting}", flush=True)
            with links(ranks, rate) as made:
                code, found = measure(made, options)
            if code:
                return code
            rows += [replace(row, setting=setting) for row in found]
            if options.json:
                write_json(rows, options.json)
    if options.png:
        plot(rows, options.png)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = parse_options(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # shells let what runs behind them ignore the first
        signal.signal(number, signal.default_int_handler)
    try:
        return run(options)
    except ConfigError as error:
        print(f"slow_link: error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
