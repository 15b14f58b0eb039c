"""Services and workers whose builds sleep in real worker processes.

`python -c 'import sleepy_service as s; s.main()'` serves, and `s.work()` is `roller worker` with its options.

SLEEPY_CLAIM_S, SLEEPY_BUILD_S and SLEEPY_PUBLISH_S are how long a claim, a build and the writing of a result's name take.
Every claim, build and name is a line in the file SLEEPY_LOG: `claimed OPERATION`, `build EXPRESSION`, `by FORK_SERVER`,
`publishing ACTION`, `published ACTION DIGEST`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from builders import text_kernel

import roller_svc.service.app
import roller_svc.service.worker
from roller_svc.cli import main as main_of_roller
from roller_svc.farm.build import BuildTask
from roller_svc.farm.queue import Claim, OperationQueue
from roller_svc.farm.store import Artifact, Store
from roller_svc.service import server
from roller_svc.service.logs import configure_logging
from roller_svc.settings import read_settings

CLAIM_S, BUILD_S, PUBLISH_S = (float(os.environ.get(f"SLEEPY_{name}_S", "0")) for name in ("CLAIM", "BUILD", "PUBLISH"))
LOG = Path(os.environ["SLEEPY_LOG"])


def note(line: str) -> None:
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"{line}\n")


def sleepy_build(task: BuildTask) -> Artifact:
    """A kernel whose digest differs at every build, as a measured one's may."""
    expression = task.request.expression
    note(f"build {expression}")
    note(f"by {os.getppid()}")
    time.sleep(BUILD_S)
    return text_kernel(task.request, f"{expression} {time.time_ns()} {os.getpid()}")


class SleepyStore(Store):
    """Takes its time between the blobs of an artifact and the end of its publication."""

    def publish(self, action: str, artifact: Artifact) -> dict[str, object]:
        note(f"publishing {action}")
        time.sleep(PUBLISH_S)
        facts = super().publish(action, artifact)
        note(f"published {action} {facts['digest']}")
        return facts


class SleepyQueue(OperationQueue):
    """Takes its time between a claim and its build."""

    def claim(self, *given: Any, **named: Any) -> Claim | None:
        claim = super().claim(*given, **named)
        if claim is not None:
            note(f"claimed {claim.id}")
            time.sleep(CLAIM_S)
        return claim


def main() -> None:
    """Serve with the ROLLER_* settings."""
    settings = read_settings()
    server.raise_descriptor_limit()
    configure_logging(settings)
    roller_svc.service.app.Store = SleepyStore  # where create_app finds it
    roller_svc.service.app.OperationQueue = SleepyQueue
    app = roller_svc.service.app.create_app(settings, work=sleepy_build)
    server.ServiceServer(server.server_config(app, settings)).run()


def work() -> None:
    """Work with the ROLLER_* settings and the options of `roller worker`."""
    roller_svc.service.worker.Store = SleepyStore  # where FarmWorker finds it
    roller_svc.service.worker.OperationQueue = SleepyQueue
    run_worker = roller_svc.service.worker.run_worker
    roller_svc.service.worker.run_worker = lambda *given: run_worker(*given, work=sleepy_build)
    sys.exit(main_of_roller(["worker", *sys.argv[1:]]))
