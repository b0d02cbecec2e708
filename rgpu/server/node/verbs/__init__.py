"""Verbs that a node answers to users, operators and agents. Imports no leader commands and no worker internals."""
