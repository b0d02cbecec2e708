"""What a node answers: users, operators, the leader's commands.

Each verb asks the node, the leader or the store, no worker's inside.
"""
