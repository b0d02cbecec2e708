"""Calls of functions: which are reached, through pointers too, and the heap behind malloc and free."""
