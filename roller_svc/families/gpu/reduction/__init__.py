"""Row and column reductions on a GPU."""
