"""Residents: a process of a user that has imported what an agent needs, and forks one for each plain `rgpu run`.

What `rgpu run` imports of it before it hands over is as little as can be. It knows no pool.
"""
