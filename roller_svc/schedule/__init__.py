"""Schedules and schedule trees: hand-written schedules, transforms, legality, prepacking."""
