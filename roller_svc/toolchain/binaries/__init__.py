"""Readers of compiled binaries: cubins, SASS and AMD code objects."""
