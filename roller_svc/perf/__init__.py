"""The micro performance model: RProgram → Estimate."""
