"""LLVM IR to machine code, within bounds of time, memory and stack. It imports no PTX module."""
