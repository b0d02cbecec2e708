"""Work that runs on the cuda device: modules, streams, graphs, host functions. It handles no pages."""
