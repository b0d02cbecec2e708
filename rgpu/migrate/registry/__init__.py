"""The registry: keys and values with leases, watches and transactions, embedded or in etcd. It knows no key."""
