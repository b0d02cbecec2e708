"""What the leader commands of a node, with an entrance of its own: fenced by the leader's revision (OWNERSHIP 6).

Users' and operators' verbs do not come here, and know nothing of it.
"""
