"""Parts that several kernel families share. They import no family."""
