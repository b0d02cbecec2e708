"""The pool's secret on a node: follows the record of its rotation, and fetches missing secrets from other nodes or
gives them theirs. It imports no sessions and no verbs of the leader.
"""
