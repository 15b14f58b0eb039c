"""What a program means: interpreter, rounding, comparison, test inputs."""
