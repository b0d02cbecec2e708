"""What benchmarks share: pools, proxies that delay or shape, workloads as processes, tables of figures."""
