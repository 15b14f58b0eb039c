"""The nouns: frozen values that every stage shares, their printer and their JSON."""
