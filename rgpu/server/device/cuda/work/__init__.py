"""What runs on the cuda device: modules, streams, graphs, host functions. It knows no pages."""
