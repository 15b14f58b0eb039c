"""Schedule trees → kernel text."""
