"""Does a simulated step take as long as a measured one, and wait as long for collectives?

    torchrun --nproc-per-node 4 scripts/bench/simulator.py --json rows.json

All ranks profile one LLaMA layer, then train a few steps under each of the five schedules, through Accelerate as users
do, and the simulator replays the same schedules with the profile. Printed are times, errors, and what part of a step
the compute lane waits for collectives; the order of the schedules must be the same. Ranks are meant to sit behind slow
links, with one thread per core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))


from oases_hf import OasesPlugin
from oases_hf.plan import SCHEDULE_NAMES
from oases_hf.planner import Problem, uniform_plan
from oases_hf.simulator import simulate
from scripts.bench.training import measure, profiled


@dataclass(frozen=True)
class Row:
    """A schedule, simulated and measured; ms of an optimizer step, and of these waiting for collectives."""

    schedule: str
    simulated_ms: float
    measured_ms: float
    simulated_exposed_ms: float
    measured_exposed_ms: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.simulated_ms / self.measured_ms - 1

    @property
    def exposed_error(self) -> float:
        """Of the part of the step that is waited, in points."""
        return 100 * (self.simulated_exposed_ms / self.simulated_ms - self.measured_exposed_ms / self.measured_ms)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 512, "heads": 8, "ffn": 1376, "layers": 4, "seq": 128, "batch": 8, "vocab": 1024}
    for name, default in {**sizes, "accumulation": 4, "steps": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no", help="default: no")
    parser.add_argument("--json", type=Path, help="write the rows")
    parser.add_argument("--costs", type=Path, help="write the cost table")
    return parser.parse_args(argv)


def report(rows: Sequence[Row]) -> None:
    """Print the rows, and what follows from them."""
    print(f"{'':12}  simulated ms  measured ms  error  simulated waiting  measured  points off")
    for row in rows:
        waits = (row.simulated_exposed_ms / row.simulated_ms, row.measured_exposed_ms / row.measured_ms)
        print(
            f"{row.schedule:12}  {row.simulated_ms:12.0f}  {row.measured_ms:11.0f}  {row.error:+5.1%}  "
            f"{waits[0]:17.1%}  {waits[1]:8.1%}  {row.exposed_error:+10.1f}"
        )
    errors = [abs(row.error) for row in rows]
    orders = [
        [row.schedule for row in sorted(rows, key=key)]
        for key in (lambda row: row.simulated_ms, lambda row: row.measured_ms)
    ]
    same = "the same order" if orders[0] == orders[1] else f"measured order {', '.join(orders[1])}"
    print(f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}; {same}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark on the ranks that a launcher started."""
    options = parse_options(argv)
    costs, model, mesh = profiled(options, (1, 2))
    problem = Problem(costs, options.layers, 1e9, options.accumulation)
    rows = []
    for name in SCHEDULE_NAMES:
        plan = uniform_plan(problem, name, mesh.tmp.size, model)
        found = measure(options, OasesPlugin(plan=plan))
        simulated = simulate(problem, plan)
        rows.append(Row(name, simulated.step_ms, found.ms, simulated.exposed_ms, found.waiting_ms))
    if mesh.world.rank == 0:
        report(rows)
        if options.costs:
            costs.save(options.costs)
        if options.json:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
