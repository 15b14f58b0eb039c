"""Announce queued operations by Celery messages on RabbitMQ. This module alone uses Celery.

A message has an operation's id and wakes a worker, which claims whatever is next. Messages are hints: what still waits
is announced again by the sweeper, and idle workers look into the database now and then.

- Each queue of the farm is one quorum queue for each environment, since only workers of it can claim.
- A message is dropped when it is older than MESSAGE_TTL_S or was delivered DELIVERY_LIMIT times, and a queue that
  nobody uses is deleted. Nothing is dead-lettered: the database has every operation and its failures.
- Any other message is rejected with one line in the log: it may name another time, and would wait.
- A message is acknowledged when a builder takes it, so that a busy worker holds at most one of each queue. The lease
  of the claim takes over from there: builds may take longer than RabbitMQ's consumer timeout.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from amqp.exceptions import AMQPError
from celery import Celery
from celery.exceptions import Reject
from celery.worker import WorkController, state
from celery.worker.consumer import Consumer
from kombu import Connection, Exchange, Message, Queue
from kombu.exceptions import KombuError

from roller_svc.errors import ArgumentError, BuildServiceError
from roller_svc.farm.operations import is_id
from roller_svc.farm.queue import QueuedId

TASK = "roller.build_next"
SCHEMES = ("amqp", "amqps")
MESSAGE_TTL_S = 60
DELIVERY_LIMIT = 5
QUEUE_EXPIRES_S = 3600
MAX_QUEUE_LENGTH = 100_000  # messages; the oldest is dropped first
MAX_OUTBOX_LENGTH = 10_000
MAX_BODY_BYTES = 1024  # of a message
CONNECT_TIMEOUT_S = 4
CONFIRM_TIMEOUT_S = 5
HEARTBEAT_S = 10
RECONNECT_PAUSE_S = 1.0
STOP_S = 10.0  # for a thread to end

log = logging.getLogger(__name__)

_FAILURES = (AMQPError, KombuError, OSError)


class CeleryCourier:
    """Announces operations to workers on other machines. A thread of its own publishes: `send` never waits.

    Args:
        url: of the broker, amqp://USER:PASSWORD@HOST/VHOST.
        environment: of the operations.
    """

    def __init__(self, url: str, environment: str) -> None:
        self._environment = environment
        self._app = _celery_app(url)
        self._outbox: queue.Queue[QueuedId] = queue.Queue(MAX_OUTBOX_LENGTH)
        self._failure: str | None = None
        self._is_connected: bool | None = None  # None: not known yet
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    def send(self, queued: QueuedId) -> None:
        """Announce an operation soon. Raises BuildServiceError if too many announcements wait."""
        try:
            self._outbox.put_nowait(queued)
        except queue.Full:
            raise BuildServiceError("too many announcements wait for the broker", code="broker-error") from None

    def check(self) -> None:
        """Raise BuildServiceError if the broker cannot be reached."""
        if not self._is_connected:
            why = self._failure or "not connected yet"
            raise BuildServiceError(f"the broker cannot be reached: {why}", code="broker-error")

    def close(self) -> None:
        """Stop publishing. What was not announced is announced by another process, or at the next start."""
        self._closing.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with self._app.connection_for_write(heartbeat=HEARTBEAT_S) as connection:
                    connection.connect()
                    log.info("connected to the broker")
                    self._is_connected = True
                    self._publish(connection)
            except _FAILURES as failure:
                self._failure = " ".join(str(failure).split())[:200] or type(failure).__name__
                if self._is_connected is not False:
                    log.warning("the broker is away, operations are announced later: %s", self._failure)
                self._is_connected = False
                self._empty_outbox()
                self._closing.wait(RECONNECT_PAUSE_S)

    def _publish(self, connection: Connection) -> None:
        """Publish until the courier is closed. Raises the failure of the connection."""
        producer = self._app.amqp.Producer(connection, auto_declare=False)
        last_check_s = time.monotonic()
        while not self._closing.is_set():
            if time.monotonic() - last_check_s > HEARTBEAT_S / 4:
                last_check_s = time.monotonic()
                _check_connection(connection)
            try:
                queued = self._outbox.get(timeout=0.25)
            except queue.Empty:
                continue
            # No declaration: a queue that no worker has declared has no worker either.
            self._app.send_task(
                TASK,
                (queued.id,),
                task_id=queued.id,
                producer=producer,
                retry=False,
                ignore_result=True,
                queue=_broker_queue(queued.queue, self._environment),
                declare=[],
                expiration=MESSAGE_TTL_S,
                confirm_timeout=CONFIRM_TIMEOUT_S,
                origin="roller",
            )

    def _empty_outbox(self) -> None:
        """Drop what waits: the sweeper announces it again."""
        try:
            while True:
                self._outbox.get_nowait()
        except queue.Empty:
            return


class CeleryReceiver:
    """Receives announcements by a Celery worker in a thread, and reconnects whenever the broker returns.

    Args:
        url: of the broker.
        environment: of this worker.
        queues: of the farm, by name.
        offer: waits until a builder is idle and wakes it; returns False if this worker stops.
    """

    def __init__(self, url: str, environment: str, queues: Sequence[str], offer: Callable[[], bool]) -> None:
        self._app = _celery_app(url)
        self._app.conf.task_queues = [_broker_queue(name, environment) for name in queues]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)

        def build_next(_: str) -> None:
            if not offer():
                raise Reject("this worker stops", requeue=True)

        self._app.task(build_next, name=TASK)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop receiving. `offer` must return False from now on; unacknowledged messages go to other workers."""
        self._closing.set()
        state.should_stop = 0
        self._thread.join(STOP_S)
        state.should_stop = None

    def _run(self) -> None:
        """Receive, and begin again when the Celery worker gave up, which logs why."""
        while not self._closing.is_set():
            controller = WorkController(
                app=self._app,
                pool_cls="threads",
                concurrency=1,
                consumer_cls=_AnnouncementConsumer,
                without_mingle=True,
                without_gossip=True,
                without_heartbeat=True,
            )
            controller.start()
            self._closing.wait(RECONNECT_PAUSE_S)


class _AnnouncementConsumer(Consumer):
    """A consumer of tasks alone: no remote control, no events, no queues for delayed messages."""

    class Blueprint(Consumer.Blueprint):
        default_steps = (
            "celery.worker.consumer.connection:Connection",
            "celery.worker.consumer.tasks:Tasks",
            "celery.worker.consumer.consumer:Evloop",
        )

    def create_task_handler(self) -> Callable[[Message], None]:
        handle = super().create_task_handler()

        def receive(message: Message) -> None:
            fault = _find_fault(message)
            if fault is None:
                handle(message)
            else:
                log.warning("a message that is no announcement is dropped: %s", fault)
                message.reject_log_error(log, self.connection_errors)

        return receive


def _find_fault(message: Message) -> str | None:
    """Return what shows that a message is none of `CeleryCourier`, or None."""
    headers = message.headers
    if not isinstance(headers, dict) or headers.get("task") != TASK:
        return "it is of another task"
    if any(headers.get(field) is not None for field in ("eta", "expires")):
        return "it is for another time"
    body = message.body.encode() if isinstance(message.body, str) else message.body
    if len(body) > MAX_BODY_BYTES or message.content_type != "application/json" or message.content_encoding != "utf-8":
        return "its content is of another kind"
    try:
        arguments, names, options = json.loads(body)
    except (ValueError, TypeError, RecursionError):
        return "its content is of another form"
    if not (isinstance(arguments, list) and len(arguments) == 1 and isinstance(arguments[0], str) and is_id(arguments[0])):
        return "it has no operation's id"
    if names or not isinstance(options, dict) or any(options.values()):
        return "it has further parts"
    return None


def check_broker_url(url: str) -> None:
    """Raise ArgumentError, which never quotes the password, for a URL that is not RabbitMQ's."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ArgumentError(
            f"ROLLER_BROKER: expected the URL of a RabbitMQ, got the scheme {parts.scheme[:20]!r}",
            code="invalid-setting",
            hint="amqp://USER:PASSWORD@HOST:PORT/VHOST, or amqps://",
        )


def _celery_app(url: str) -> Celery:
    check_broker_url(url)
    app = Celery("roller", broker=url, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_default_queue="",  # no queue but those of the farm
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_transport_options={"confirm_publish": True},
        broker_connection_timeout=CONNECT_TIMEOUT_S,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_channel_error_retry=True,  # a quorum queue has no leader for a while after a restart
        broker_heartbeat=HEARTBEAT_S,
        broker_use_ssl=_tls_options(url),
    )
    return app


def _tls_options(url: str) -> dict[str, Any] | bool:
    """Return the options of a connection by TLS, which checks the broker's certificate."""
    parts = urlsplit(url)
    return {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": parts.hostname} if parts.scheme == "amqps" else False


def _broker_queue(name: str, environment: str) -> Queue:
    return Queue(
        f"roller.{name}.{environment[:16]}",
        exchange=Exchange(""),
        routing_key=f"roller.{name}.{environment[:16]}",
        durable=True,
        queue_arguments={
            "x-queue-type": "quorum",
            "x-delivery-limit": DELIVERY_LIMIT,
            "x-max-length": MAX_QUEUE_LENGTH,
            "x-expires": QUEUE_EXPIRES_S * 1000,
        },
    )


def _check_connection(connection: Connection) -> None:
    """Send a heartbeat if one is due, and read what the broker sent. Raises if the connection is lost."""
    connection.heartbeat_check()
    with contextlib.suppress(TimeoutError):
        connection.drain_events(timeout=0.001)
