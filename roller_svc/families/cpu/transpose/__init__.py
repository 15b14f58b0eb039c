"""Layout changes on a CPU: blocked transposes in registers."""
