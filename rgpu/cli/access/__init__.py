"""Verbs by which people come to a pool: logins, contexts, the web page."""
