"""A registry for tests: a cluster of etcd, what every implementation must do, processes that use one."""
