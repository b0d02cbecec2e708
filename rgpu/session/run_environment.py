"""Environment variables by which `rgpu run` informs its program of the run (not settings: they change nothing)."""

SESSION = "RGPU_SESSION"  #: the run's name
POOL = "RGPU_SESSION_POOL"  #: the pool's directory
