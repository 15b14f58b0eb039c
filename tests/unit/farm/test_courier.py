"""Couriers: announcements reach idle builders, and a broker that is away holds up nobody."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import pytest
from kombu import Message
from waiting import PATIENCE_S, wait_until

from roller_svc.errors import ArgumentError, BuildServiceError
from roller_svc.farm import celery_courier
from roller_svc.farm.celery_courier import CeleryCourier, CeleryReceiver, check_broker_url
from roller_svc.farm.courier import Handover
from roller_svc.farm.queue import QueuedId

SECRET = "hunter2"


def has_length(values: Sized, count: int) -> bool:
    return len(values) == count


def in_threads(count: int, work: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_an_announcement_waits_for_an_idle_builder() -> None:
    handover, offers, woken = Handover(), list[bool](), list[int]()
    offering = in_threads(3, lambda: offers.append(handover.offer()))
    assert offers == []
    for count in (1, 2, 3):
        handover.wait(PATIENCE_S)
        woken.append(count)
        wait_until(partial(has_length, offers, count))
    for thread in offering:
        thread.join()
    assert offers == [True] * 3
    handover.wait(0.01)  # nothing is offered any more


def test_a_closed_handover_gives_announcements_back_and_wakes_builders() -> None:
    handover, offers = Handover(), list[bool]()
    threads = in_threads(2, lambda: offers.append(handover.offer()))
    handover.close()
    for thread in threads:
        thread.join()
    (waiting,) = in_threads(1, lambda: handover.wait(2 * PATIENCE_S))
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert offers == [False, False]


def test_every_announcement_wakes_one_builder() -> None:
    handover, woken, lock = Handover(), list[int](), threading.Lock()

    def build() -> None:
        while not handover._is_closed:
            handover.wait(PATIENCE_S)
            with lock:
                woken.append(1)

    builders = in_threads(4, build)
    for _ in range(200):
        assert handover.offer()
    wait_until(lambda: len(woken) == 200)
    handover.close()
    for thread in builders:
        thread.join()


@pytest.mark.slow
def test_a_broker_that_is_away_delays_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(celery_courier, "RECONNECT_PAUSE_S", PATIENCE_S)  # of which a send that waits would take one
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        courier = CeleryCourier(f"amqp://farm:{SECRET}@127.0.0.1:{refusing.getsockname()[1]}//", "e" * 64)
        (sending,) = in_threads(1, lambda: [courier.send(QueuedId(f"operation-{number}", "build.cuda")) for number in range(1000)])
        sending.join(PATIENCE_S / 2)
        assert not sending.is_alive()
        wait_until(lambda: "operations are announced later" in caplog.text)
        with pytest.raises(BuildServiceError) as away:
            courier.check()
        assert away.value.code == "broker-error"
        courier.close()
    assert SECRET not in caplog.text + away.value.message
    assert caplog.text.count("announced later") == 1


@pytest.mark.slow
def test_a_broker_that_never_answers_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(celery_courier, "MAX_OUTBOX_LENGTH", 10)
    monkeypatch.setattr(celery_courier, "CONNECT_TIMEOUT_S", PATIENCE_S)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        courier = CeleryCourier(f"amqp://127.0.0.1:{silent.getsockname()[1]}//", "e" * 64)
        for number in range(10):
            courier.send(QueuedId(f"operation-{number}", "build.cuda"))
        with pytest.raises(BuildServiceError, match="too many announcements"):
            courier.send(QueuedId("operation-10", "build.cuda"))
        with pytest.raises(BuildServiceError, match="not connected yet"):
            courier.check()
        silent.close()  # which ends the attempt to connect
        courier.close()


@pytest.mark.parametrize("url", ["redis://localhost", "amqp://", "localhost:5672", f"http://x:{SECRET}@h/", "memory://"])
def test_a_url_of_another_broker_is_refused(url: str) -> None:
    with pytest.raises(ArgumentError, match="ROLLER_BROKER") as refused:
        check_broker_url(url)
    assert SECRET not in refused.value.message


def test_a_receiver_begins_again_when_celery_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = list[int]()

    class Controller:
        def __init__(self, **_: object) -> None: ...

        def start(self) -> None:
            starts.append(1)

    monkeypatch.setattr(celery_courier, "WorkController", Controller)
    monkeypatch.setattr(celery_courier, "RECONNECT_PAUSE_S", 0.01)
    receiver = CeleryReceiver("amqp://127.0.0.1//", "e" * 64, ["build.cuda"], lambda: True)
    receiver.start()
    wait_until(lambda: len(starts) > 2)
    receiver.close()
    wait_until(lambda: not receiver._thread.is_alive())


def message_of(**changes: Any) -> Message:
    """A message as the courier publishes it, with changes."""
    app = celery_courier._celery_app("amqp://127.0.0.1//")
    sent = app.amqp.as_task_v2("0000000000001-a", celery_courier.TASK, ("0000000000001-a",), ignore_result=True)
    values = {
        "headers": dict(sent.headers), "body": json.dumps(sent.body), "content_type": "application/json",
        "content_encoding": "utf-8",
    }  # fmt: skip
    values["headers"] |= changes.pop("headers", {})
    return Message(**(values | changes))


FORGED: dict[str, dict[str, Any]] = {
    "another task": {"headers": {"task": "os.system"}},
    "no task": {"headers": {"task": None}},
    "a time": {"headers": {"eta": "2099-01-01T00:00:00+00:00"}},
    "a time that is none": {"headers": {"eta": "soon"}},
    "an end": {"headers": {"expires": "2001-01-01T00:00:00+00:00"}},
    "pickle": {"content_type": "application/x-python-serialize", "body": b"\x80\x04."},
    "bytes that are no UTF-8": {"body": b"\xff\xfe["},
    "another encoding": {"content_encoding": "utf-16"},
    "junk": {"body": "{"},
    "brackets": {"body": "[" * 1024},
    "a number": {"body": "1"},
    "more arguments": {"body": '[["a", "b"], {}, {}]'},
    "an id that is none": {"body": '[["../a"], {}, {}]'},
    "an id that is a list": {"body": '[[["a"]], {}, {}]'},
    "names": {"body": '[["a"], {"x": 1}, {}]'},
    "callbacks": {"body": '[["a"], {}, {"callbacks": [{"task": "t"}]}]'},
    "much": {"body": json.dumps([["a" * 2000], {}, {}])},
}


def receiving(monkeypatch: pytest.MonkeyPatch, message: Message) -> tuple[list[Message], list[Message]]:
    """What Celery's handler gets of a message, and what is rejected."""
    handled, rejected = list[Message](), list[Message]()
    monkeypatch.setattr(celery_courier.Consumer, "create_task_handler", lambda _: handled.append)
    monkeypatch.setattr(message, "reject_log_error", lambda *_: rejected.append(message), raising=False)
    consumer = object.__new__(celery_courier._AnnouncementConsumer)
    consumer.connection_errors = ()
    consumer.create_task_handler()(message)
    return handled, rejected


def test_an_announcement_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    for body in (str, str.encode):
        message = message_of()
        message.body = body(message.body)
        assert receiving(monkeypatch, message) == ([message], [])


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_message_costs_a_line(kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    message = message_of(**FORGED[kind])
    assert receiving(monkeypatch, message) == ([], [message])
    (record,) = caplog.records
    assert (record.exc_info, "is dropped" in record.getMessage()) == (None, True)


def test_tls_checks_the_certificate() -> None:
    options = celery_courier._tls_options("amqps://farm:x@mq.example/vhost")
    assert options == {"cert_reqs": celery_courier.ssl.CERT_REQUIRED, "server_hostname": "mq.example"}
    assert celery_courier._tls_options("amqp://farm:x@mq.example/vhost") is False


@pytest.mark.slow
def test_celery_is_loaded_only_where_there_is_a_broker() -> None:
    script = (
        "import sys; import roller_svc.service.app, roller_svc.service.worker, roller_svc.cli.worker; "
        "sys.exit(any(name in sys.modules for name in ('celery', 'kombu', 'amqp')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
