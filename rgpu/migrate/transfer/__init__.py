"""Transfer of pages and calls between two workers: frames, lanes, sender, receiver, peer memory on the same host.

Decisions about a move are made elsewhere (:mod:`rgpu.migrate.move`).
"""
