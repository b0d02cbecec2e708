"""Programs of many kinds, disturbed at random in a pool of their own, and compared with themselves undisturbed.

``python -m bench.chaos`` (`make chaos`); docs/developers/howto/chaos.md says how to read its
table and how to repeat a failure.
"""
