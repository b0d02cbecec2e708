"""Detached runs of this machine: the record, the output and the lock by which processes of one user know of a run.

It knows no pool: everything here is read and written without one.
"""
