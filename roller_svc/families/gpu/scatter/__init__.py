"""Loop nests with data-dependent writes, and single points, on a GPU."""
