"""Verbs for users' access to a pool: logins, contexts, the web page."""
