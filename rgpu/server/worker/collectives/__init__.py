"""Rank links: a worker gets the contributions of other sessions' ranks to collectives, and gives those of its own."""
