"""The instructions of PTX, by group: each emits LLVM IR for one. They know the generator, not the parser."""
