"""Residents: a process of a user that has imported what an agent needs, and forks one for each plain `rgpu run`.

`rgpu run` imports as little of it as possible before it hands over. A resident holds no state of a pool.
"""
