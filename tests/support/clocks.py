"""Wall clocks of databases that tests step, and monotonic clocks that tests move."""

from __future__ import annotations

import itertools
import time
from typing import Any

from sqlalchemy import event, text

from roller_svc.farm.database.connect import Database

HOUR_S = 3600.0
_numbers = itertools.count()


class ManualClock:
    """A monotonic clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class WallClock:
    """The clock of a database's new connections, wrong by an offset: what its `now` is, in SQL."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._offset_s = 0.0
        self._schema = f"clock{next(_numbers)}"
        if database.is_sqlite:
            self._replace_julianday()
        else:
            self._replace_clock_timestamp()
        database.engine.dispose()  # connections that were made before

    @property
    def offset_s(self) -> float:
        return self._offset_s

    def step(self, seconds: float) -> None:
        """Set the clock forward, or back."""
        self._offset_s += seconds
        if not self._database.is_sqlite:
            with self._database.write() as connection:
                connection.execute(text(f"UPDATE {self._schema}.step SET offset_s = {self._offset_s}"))

    def _replace_julianday(self) -> None:
        def julian_day(_: str) -> float:
            return (time.time() + self._offset_s) / 86_400 + 2_440_587.5

        @event.listens_for(self._database.engine, "connect")
        def replace(connection: Any, _: object) -> None:
            connection.create_function("julianday", 1, julian_day)

    def _replace_clock_timestamp(self) -> None:
        """Give the search path a function of the same name before PostgreSQL's own."""
        with self._database.write() as connection:
            for statement in (
                f"CREATE SCHEMA {self._schema}",
                f"CREATE TABLE {self._schema}.step AS SELECT 0.0::double precision AS offset_s",
                f"CREATE FUNCTION {self._schema}.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS "
                f"'SELECT pg_catalog.clock_timestamp() + make_interval(secs => (SELECT offset_s FROM {self._schema}.step))'",
            ):
                connection.execute(text(statement))

        @event.listens_for(self._database.engine, "connect")
        def replace(connection: Any, _: object) -> None:
            connection.execute(f"SET search_path = {self._schema}, pg_catalog, public")
            connection.commit()
