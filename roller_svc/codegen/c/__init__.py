"""Schedule trees → C source."""
