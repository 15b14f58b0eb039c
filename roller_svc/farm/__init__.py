"""Builds as jobs, and the store that keeps what they make. The durable queue will stand behind the same names."""
