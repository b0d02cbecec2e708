"""Calls of functions: those that are reached, also through pointers, and the heap behind malloc and free."""
