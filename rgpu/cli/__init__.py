"""The command `rgpu`: a module for each verb, loaded when it is used."""
