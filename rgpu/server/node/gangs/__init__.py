"""Gangs as shown to users: their rows, which ranks wait for which, the verbs that return them."""
