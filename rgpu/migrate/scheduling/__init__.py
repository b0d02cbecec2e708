"""Decisions about the pool: placement, queue, preemption, rebalancing.

Pure: each is a function of one immutable :class:`~rgpu.migrate.scheduling.snapshot.Snapshot` (or of
the :class:`~rgpu.migrate.scheduling.index.Index` made from it, which holds the same data as arrays)
and returns a result with a reason sentence. The coordinator and ``rgpu simulate`` run the same code.
"""
