"""Kernel groups → groups of several launches: split reductions and split keys."""
