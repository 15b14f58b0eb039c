"""Ways to run a graph: operator by operator, or in parts on several devices."""
