"""A virtual clock over recorded task lists, driving the scheduling code that the coordinator runs."""
