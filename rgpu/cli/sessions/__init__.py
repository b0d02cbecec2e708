"""Verbs about sessions: run them, look at them, end them."""
