"""Gangs: how many of a gang's ranks each host takes, which hosts they go to together, who moves with whom. Pure."""
