"""The instructions of PTX, by group: each emits LLVM IR for one. They import the generator, not the parser."""
