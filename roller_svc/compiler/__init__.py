"""The compilation pipeline: expression and target → the best kernel. Start at `pipeline.py`."""
