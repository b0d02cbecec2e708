"""Pages of the documentation, executed as they are written, on machines that are network and mount namespaces."""
