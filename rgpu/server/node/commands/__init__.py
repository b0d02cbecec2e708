"""The leader's commands to a node, with an entrance of their own: fenced by the leader's revision (OWNERSHIP 6).

Verbs of users and operators neither pass here nor import this.
"""
