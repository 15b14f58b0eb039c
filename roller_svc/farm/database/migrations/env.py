"""Alembic's environment: run migrations on the connection of `upgrade`, within its transaction."""

from alembic import context

from roller_svc.farm.database.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=False,  # the caller's transaction holds all of it
    render_as_batch=True,  # SQLite cannot alter columns
)
context.run_migrations()
