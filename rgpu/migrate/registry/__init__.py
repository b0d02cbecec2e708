"""The registry: keys and values with leases, watches and transactions, embedded or in etcd; keys are opaque."""
