"""What `rgpu run` tells its program of the run, by variables of its environment (not settings: they change nothing)."""

SESSION = "RGPU_SESSION"  #: the run's name
POOL = "RGPU_SESSION_POOL"  #: the pool's directory
