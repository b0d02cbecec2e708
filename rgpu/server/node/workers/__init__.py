"""The daemon's side of its workers: started, warm, adopted, given shares of compute.

It knows their requests, not their inside.
"""
