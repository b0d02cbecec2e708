"""The pool's secret on a node: follows the record of its rotation, fetches what it lacks from other nodes, and gives it
to those. It knows no session and no verb of the leader.
"""
