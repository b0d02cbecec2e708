"""Calls of functions: those that are reached, through pointers too, and the heap behind malloc and free."""
