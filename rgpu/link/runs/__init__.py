"""Detached runs of this machine: the record, the output and the lock by which processes of one user find a run.

No pool is needed: everything here is read and written without one.
"""
