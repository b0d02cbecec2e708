"""The registry in etcd: addresses, calls, watches. Keys and values have no meaning here."""
