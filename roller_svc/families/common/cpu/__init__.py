"""Parts of CPU families."""
