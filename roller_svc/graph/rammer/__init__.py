"""RAMMER (OSDI 2020): operators of a graph as rTasks on a virtual device."""
