"""Browsers for the web page: one that runs no scripts, and a real one."""
