"""Parts of GPU families."""
