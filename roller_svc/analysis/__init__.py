"""Questions about IR values that several stages ask. Pure functions."""
