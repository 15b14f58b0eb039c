"""Load on a service of its own, and what becomes of it. Prints JSON.

python tests/fuzz/load.py fuzz --count 10000       requests of a hostile client (tests/fuzz)
python tests/fuzz/load.py soak --seconds 300       a mixed load at a steady rate: memory, latencies
python tests/fuzz/load.py fairness                 compiles beside another client's endless estimates
python tests/fuzz/load.py silent                   connections on which nothing comes
python tests/fuzz/load.py kill --count 300         a worker killed every second
python tests/fuzz/load.py freeze                   programs that take long to check
python tests/fuzz/load.py body                     bodies that take long to refuse
"""

from __future__ import annotations

import argparse
import json
import sys

import load_scenarios as scenarios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="before the verb")
    kinds = parser.add_subparsers(dest="verb", required=True)
    one = kinds.add_parser("fuzz", help=scenarios.fuzz.__doc__)
    one.add_argument("--count", type=int, help="requests; without it, as many as there is time for")
    one.add_argument("--seconds", type=float, default=60.0)
    one.add_argument("--first", type=int, default=0, help="a fault in 27:28 is here again with --seed 27 and this 28")
    one = kinds.add_parser("soak", help=scenarios.soak.__doc__)
    one.add_argument("--seconds", type=float, default=300.0)
    one.add_argument("--rate", type=float, default=20.0, help="requests a second")
    one = kinds.add_parser("fairness", help=scenarios.fairness.__doc__)
    one.add_argument("--seconds", type=float, default=60.0)
    one.add_argument("--items", type=int, default=1024, help="estimates of one request")
    one.add_argument("--clients", type=int, default=1, help="that ask for estimates")
    one = kinds.add_parser("silent", help=scenarios.silent.__doc__)
    one.add_argument("--seconds", type=float, default=20.0, help="for each kind of connection")
    one.add_argument("--connections", type=int, default=150)
    one = kinds.add_parser("kill", help=scenarios.kill.__doc__)
    one.add_argument("--count", type=int, default=300, help="compiles")
    one.add_argument("--seconds", type=float, default=600.0, help="at most")
    one.add_argument("--match", default="build_task", help="part of the name of the processes to kill; empty: all")
    kinds.add_parser("freeze", help=scenarios.freeze.__doc__)
    kinds.add_parser("body", help=scenarios.body.__doc__)
    options = parser.parse_args()
    found = getattr(scenarios, options.verb)(options)
    print(json.dumps(found, indent=1))
    return 1 if found.get("faults") else 0


if __name__ == "__main__":
    sys.exit(main())
