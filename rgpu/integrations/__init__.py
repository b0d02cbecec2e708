"""Callbacks for training frameworks, each in a module of its framework's name. They use the public Python API only."""
