"""What all tests share: those that need a device or a compiler that is not here are skipped, and so not counted.

No test measures this machine by accident, neither here nor in a child process: `local` has assumed rates.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from databases import postgresql_server
from hypothesis import HealthCheck, settings
from sampling import have_few_examples
from skips import PACKAGES, SkipReport

from roller_svc.runtime.cuda.module import device_present

RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # Debian's

os.environ["ROLLER_CALIBRATE"] = "0"
os.environ["ROLLER_CACHE_KERNELS"] = "0"  # tests see what a compile does
os.environ["ROLLER_TUNE"] = "off"  # and start no processes of their own
os.environ["ROLLER_CHECK_TIMEOUT_S"] = "120"  # a machine may stop a process for longer than a check should take
os.environ.pop("ROLLER_LOCAL_SPEC", None)

# random examples are the same in each run, and none is timed
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL of a server, whose databases are those of `databases.new_database`."""
    with postgresql_server() as url:
        yield url


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--max-cases", type=int, default=None, help="run at most so many cases of each test, evenly spread, and fewer random ones"
    )
    parser.addoption("--strict-skips", action="store_true", help="fail if a test is skipped for a reason that CI does not allow")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.max_cases is not None:
        have_few_examples()
    if not hasattr(config, "workerinput"):  # reports of workers of xdist come to the controller
        config.pluginmanager.register(SkipReport(strict=config.option.strict_skips), "skips-by-reason")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector, a third of the time: modules and tests stay, and it looks at all of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after the selection by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_without_parts(items)
    if config.option.max_cases is not None:
        items[:], left_out = _sample_cases(items, config.option.max_cases)
        config.hook.pytest_deselected(items=left_out)


def _sample_cases(items: list[pytest.Item], limit: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return at most `limit` cases of each test, the first and others at equal distances, and the rest."""
    totals = Counter(item.nodeid.partition("[")[0] for item in items)
    seen, kept, left_out = Counter[str](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        number, total = seen[test], totals[test]
        seen[test] += 1
        is_kept = total <= limit or number == 0 or number * limit // total != (number - 1) * limit // total
        (kept if is_kept else left_out).append(item)
    return kept, left_out


def _skip_without_parts(items: list[pytest.Item]) -> None:
    missing = {
        "gpu": None if device_present() else "there is no NVIDIA device here",
        "farm": None if RABBITMQ.exists() else "there is no rabbitmq-server here (apt install rabbitmq-server)",
        "two_cores": None if len(os.sched_getaffinity(0)) > 1 else "this process may use one core only",
        "emulator": None if shutil.which("g++") else "there is no g++ here (apt install g++)",
    }
    for item in items:
        for program in (name for marker in item.iter_markers("needs") for name in marker.args):
            package = PACKAGES[program]
            if shutil.which(program) is None:
                item.add_marker(pytest.mark.skip(reason=f"there is no {program} here (apt install {package})"))
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
