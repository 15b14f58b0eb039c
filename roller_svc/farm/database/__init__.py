"""The farm's SQL database: tables, connections, migrations."""
