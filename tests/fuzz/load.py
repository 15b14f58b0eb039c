"""Load-test a service that this program starts. Prints JSON.

python tests/fuzz/load.py fuzz --count 10000       requests of a hostile client
python tests/fuzz/load.py soak --seconds 300       mixed load at a steady rate: memory, latencies
python tests/fuzz/load.py fairness                 compiles while another client floods estimates
python tests/fuzz/load.py silent                   idle connections
python tests/fuzz/load.py kill --count 300         a worker killed every second
python tests/fuzz/load.py freeze                   programs that are slow to check
python tests/fuzz/load.py body                     bodies that are slow to reject
"""

from __future__ import annotations

import argparse
import json
import sys

import load_scenarios as scenarios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="random seed; before the subcommand")
    commands = parser.add_subparsers(dest="verb", required=True)
    command = commands.add_parser("fuzz", help=scenarios.fuzz.__doc__)
    command.add_argument("--count", type=int, help="requests (default: until --seconds have passed)")
    command.add_argument("--seconds", type=float, default=60.0)
    command.add_argument(
        "--first", type=int, default=0, help="number of the first request; --seed 27 --first 28 reproduces fault 27:28"
    )
    command = commands.add_parser("soak", help=scenarios.soak.__doc__)
    command.add_argument("--seconds", type=float, default=300.0)
    command.add_argument("--rate", type=float, default=20.0, help="requests per second")
    command.add_argument("--fill", type=int, default=0, help="batches of 1,024 large estimates before it, which fill the caches")
    command.add_argument("--builds", type=float, default=25.0, help="percent of the requests that need a new build")
    command.add_argument("--estimates", type=float, default=20.0, help="percent of the requests that need eight new estimates")
    command = commands.add_parser("fairness", help=scenarios.fairness.__doc__)
    command.add_argument("--seconds", type=float, default=60.0)
    command.add_argument("--items", type=int, default=1024, help="estimates per request")
    command.add_argument("--clients", type=int, default=1, help="clients that request estimates")
    command = commands.add_parser("silent", help=scenarios.silent.__doc__)
    command.add_argument("--seconds", type=float, default=20.0, help="per kind of connection")
    command.add_argument("--connections", type=int, default=150)
    command = commands.add_parser("kill", help=scenarios.kill.__doc__)
    command.add_argument("--count", type=int, default=300, help="number of compiles")
    command.add_argument("--seconds", type=float, default=600.0, help="time limit")
    command.add_argument("--match", default="build_task", help="kill processes whose name contains this; empty: all")
    commands.add_parser("freeze", help=scenarios.freeze.__doc__)
    commands.add_parser("body", help=scenarios.body.__doc__)
    options = parser.parse_args()
    report = getattr(scenarios, options.verb)(options)
    print(json.dumps(report, indent=1))
    return 1 if report.get("faults") else 0


if __name__ == "__main__":
    sys.exit(main())
