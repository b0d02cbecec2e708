"""The registry in etcd: addresses, calls, watches. It knows keys and values, and nothing of what they mean."""
