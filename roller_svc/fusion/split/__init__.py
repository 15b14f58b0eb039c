"""Splitting of reductions: kernel group → groups of several launches (split-K, split-KV)."""
