"""Models loaded on their device."""
